"""What the sandbox costs: a program of one line in it, against a bare `subprocess.run`.

    python benchmarks/sandbox.py

They take turns. Then a batch of programs by as many threads as there are CPUs, and the verdict of
asserts, for which two sandboxes start.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from common import command, interleaved, median_ratio

from nemorl.rollout.code_reward import judge_program
from nemorl.rollout.sandbox import ProgramLimits, run_program

PROGRAM = "print(1)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How often, and how many."""

    rounds: int = 30
    """Turns of each."""
    batch: int = 64
    """Programs that run at once."""


def bare() -> None:
    run = [sys.executable, "-I", "-c", PROGRAM]
    assert subprocess.run(run, capture_output=True, check=True).stdout == b"1\n"


def shut_in() -> None:
    assert run_program(PROGRAM, limits=ProgramLimits(wall=60)).stdout == "1\n"


def verdict() -> None:
    assert all(judge_program("def f(x): return x + 1", ["assert f(1) == 2"] * 3))


def many(call: Callable[[], None], count: int) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda _: call(), range(count)))


def main(options: Options) -> None:
    calls: dict[str, Callable[[], None]] = {
        "bare subprocess.run": bare,
        "bubblewrap": shut_in,
        "three asserts": verdict,
    }
    print(f"  {'':<30}{'ms':>7}{'ratio':>7}{'a second':>10}   medians")
    alone = interleaved(list(calls.values()), options.rounds)
    batches = [partial(many, call, options.batch) for call in calls.values()]
    together = interleaved(batches, max(1, options.rounds // 10))
    for name, one, batch in zip(calls, alone, together, strict=True):
        rate = options.batch / statistics.median(batch)
        cost = median_ratio(alone[0], one)  # how many times as long
        print(f"  {name:<30}{statistics.median(one) * 1e3:7.1f}{cost:7.2f}{rate:10.0f}")


if __name__ == "__main__":
    command(main, Options, rounds=2, batch=4)

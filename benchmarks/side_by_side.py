"""Two runs of `nemorl.train` side by side on one machine, against one alone.

    python benchmarks/side_by_side.py

Each run is a process of its own, with the limit that nemorl sets to the spinning of OpenMP's
threads, and without. Two runs that share the cores evenly take twice as long as one.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import command, load_tokenizer, quiet, save_model

SPINNING = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""What the runtimes do by default. Set by the user, it is not changed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    rounds: int = 3
    """How often all is run, in turns."""
    steps: int = 6
    """Steps of a run; the first is not counted."""
    threads: int = os.cpu_count() or 1
    """Of each run, as torch would choose."""
    limit_s: float = 120.0
    """How long each run may take; one that is stopped counts with the steps that it took."""


def run(folder: Path, name: str, steps: int) -> None:
    """Train, as the script of a user would."""
    import nemorl  # before torch

    rows = [{"prompt": f"t{i} t{i + 1}", "answer": f"t{i}"} for i in range(2, 66)]
    nemorl.train(
        folder / "model",
        rows,
        lambda prompt, response: float("t2" in response),
        tokenizer=load_tokenizer(folder / "model"),
        max_num_steps=steps,
        num_prompts_per_step=8,
        num_generations_per_prompt=8,
        max_new_tokens=16,
        lr=1e-4,
        run={"dir": str(folder / name), "display": "none", "plots": False, "export": False},
    )


def seconds(folder: Path, count: int, options: Options, spinning: bool) -> float:
    """Return the median seconds per step of `count` runs at the same time."""
    variables = {key: value for key, value in os.environ.items() if key not in SPINNING}
    variables |= {"OMP_NUM_THREADS": str(options.threads), **(SPINNING if spinning else {})}
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        names = [f"{Path(runs).name}/{number}" for number in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "run", str(folder), name, str(options.steps)],
                env=variables,
            )
            for name in names
        ]
        for process in processes:
            try:
                if process.wait(options.limit_s):
                    raise SystemExit("a run failed; see above")
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        lines = [
            json.loads(line)
            for name in names
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
    return statistics.median(line["seconds"] for line in lines if line["step"] > 1)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", hidden=128, layers=2)
        cases = [(spinning, count) for spinning in (False, True) for count in (1, 2)]
        found: dict[tuple[bool, int], list[float]] = {case: [] for case in cases}
        for _ in range(options.rounds):
            for spinning, count in cases:
                found[spinning, count].append(seconds(folder, count, options, spinning))
    median = {case: statistics.median(times) for case, times in found.items()}
    print("| OpenMP's threads | one run, s/step | two side by side, s/step | ratio |")
    print("|---|---|---|---|")
    for spinning, kind in ((False, "as nemorl sets them"), (True, "spinning, OpenMP's default")):
        one, two = median[spinning, 1], median[spinning, 2]
        print(f"| {kind} | {one:.2f} | {two:.2f} | {two / one:.1f} |")


if __name__ == "__main__":
    quiet()
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        command(main, Options, rounds=1, steps=3, limit_s=60.0)

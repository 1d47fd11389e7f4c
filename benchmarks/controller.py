"""What a step costs the controller, the one process that runs the loop, as ranks are added: its CPU
milliseconds for each kind of call, in all its threads.

    python benchmarks/controller.py

The ranks are Ray actors on this machine that share a model of a few thousand parameters, so that
next to nothing is computed; they take turns on its cores, which the controller's own time does not
count. A call goes to every rank, but its batch is stored once, and rank 0 alone answers with
values. Where the time grew with ranks times batch, the last column would grow with the ranks.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import command, saved_model
from train_step import batch_of

from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.algorithms.sft import loss_fn
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
from nemorl.runtime.ranks.trainer import RankedTrainer, make_trainer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes."""

    ranks: tuple[int, ...] = (2, 8, 32)
    """Numbers of ranks."""
    sequences: int = 64
    """Of a step."""
    more: int = 8
    """How many times as many sequences the larger batch of the last column has."""
    length: int = 64
    """Tokens of each sequence."""
    hidden: int = 8
    """Width of the model."""
    rounds: int = 5
    """Calls of each kind; the median counts."""


def main(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with saved_model(hidden=options.hidden, layers=2, positions=64) as (folder, size):
        tokens = options.sequences * options.length
        print(
            f"{size / 1e3:.1f} thousand parameters, {tokens} tokens a step; the controller's CPU"
            " milliseconds for each call, and their ratio to the least ranks'"
        )
        first: dict[str, float] | None = None
        for ranks in options.ranks:
            found = measured(options, folder, ranks)
            first = first or found
            if found is first:
                print(f"  {'ranks':>5}" + "".join(f"{name:>20}" for name in found))
            cells = (f"{ms:11.1f} ({ms / first[name]:5.2f})" for name, ms in found.items())
            print(f"  {ranks:5}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def measured(options: Options, folder: Path, ranks: int) -> dict[str, float]:
    """Return the controller's milliseconds for each kind of call."""
    plan = ParallelPlan(dp_shard=ranks).with_precision(accelerator=False)
    config = BaseConfig(
        parallel=plan,
        trainer=TrainerConfig(device="cpu"),
        runtime=RuntimeConfig(oversubscribe=True),
    )
    trainer = make_trainer(config, DTensorBackend, plan, folder / "logs")
    try:
        return calls_of(trainer, options, folder, config)
    finally:
        trainer.shutdown()


def calls_of(
    trainer: RankedTrainer, options: Options, folder: Path, config: BaseConfig
) -> dict[str, float]:
    backend = BackendConfig(
        model=ModelConfig(path=str(folder / "model")),
        trainer=config.trainer,
        optimizer=OptimizerConfig(),
        parallel=config.parallel,
    )
    trainer.setup(backend)
    small = batch_of([options.length] * options.sequences)
    large = batch_of([options.length] * options.sequences * options.more)
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: trainer.train_step(small, loss_fn),
        "get_logprobs": lambda: trainer.get_logprobs(replace(small, loss_weights=None)),
        "send_weights": lambda: trainer.send_weights(count),
        "save_checkpoint": lambda: trainer.save_checkpoint(folder / "checkpoint"),
        "a larger train_step": lambda: trainer.train_step(large, loss_fn),
    }
    return {name: milliseconds(call, options.rounds) for name, call in calls.items()}


def count(weights: Any) -> int:
    """Take weights, as engines do, on rank 0."""
    return sum(tensor.numel() for _, tensor in weights)


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU time of this process over calls, without the first."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    command(main, Options, ranks=(1, 2), sequences=4, more=2, rounds=1)

"""Weights and checkpoints of a model that ranks share: export, save (and the part of it that
training waits for) and load, in GB/s.

    python benchmarks/sharded_io.py

Export is every parameter gathered whole on rank 0, against a copy of the same bytes in memory.
Saving and loading are of model and optimizer, against plain copies of the same files to the disk
and from it, in turns in the same run.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import command, quiet, saved_model
from parallel import become_rank, free_port
from train_step import batch_of

from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.algorithms.sft import loss_fn


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes."""

    plans: tuple[str, ...] = ("", "dp_shard=2", "tp=2")
    """Degrees; an empty one is a process by itself."""
    width: int = 768
    """Of the model: 768 makes 72 M parameters."""
    layers: int = 8
    """Of the model."""
    rounds: int = 5
    """Turns of each; medians count."""


def main(options: Options) -> None:
    sizes = {"hidden": options.width, "layers": options.layers, "positions": 128}
    with saved_model(**sizes) as (folder, size):
        print(
            f"{size / 1e6:.0f} M parameters in float32; GB/s, and the ratio to the baseline"
            " beside it"
        )
        print(f"  {'':10}{'export':>14}{'save':>14}{'of it training waits':>24}{'load':>14}")
        for text in options.plans:
            degrees: dict[str, Any] = {
                key: int(value)
                for key, value in (pair.split("=") for pair in text.split(",") if pair)
            }
            plan = ParallelPlan(**degrees)
            found = mp.get_context("spawn").Manager().dict()
            mp.spawn(measure, (plan, folder, options.rounds, free_port(), found), plan.num_ranks)
            times = {what: statistics.median(values) for what, values in found["seconds"].items()}
            weights, files = found["bytes"]
            rates = [
                (weights, "export", "copy in memory"),
                (files, "save", "copy to disk"),
                (files, "begin", "copy to disk"),
                (files, "load", "read"),
            ]
            cells = [
                f"{amount / times[what] / 1e9:7.2f} ({times[against] / times[what]:.2f})"
                for amount, what, against in rates
            ]
            waits = f"{cells[2]} {times['begin']:.2f} s"
            print(
                f"  {text or 'alone':10}{cells[0]:>14}{cells[1]:>14}{waits:>24}{cells[3]:>14}",
                flush=True,
            )


def measure(
    rank: int, plan: ParallelPlan, folder: Path, rounds: int, port: int, found: Any
) -> None:
    quiet()
    torch.set_num_threads(1)
    if plan.num_ranks > 1:
        become_rank(rank, plan.num_ranks, port)
    backend = DTensorBackend()
    backend.setup(
        BackendConfig(
            model=ModelConfig(path=str(folder / "model")),
            trainer=TrainerConfig(device="cpu"),
            parallel=plan,
            optimizer=OptimizerConfig(),
        )
    )
    backend.train_step(batch_of([16] * 4), loss_fn)
    target, copy = folder / f"checkpoint-{os.environ.get('MASTER_PORT', 0)}", folder / "copy"
    seconds: dict[str, list[float]] = {}

    def timed(what: str, function: Callable[[], Any]) -> None:
        if plan.num_ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        function()
        seconds.setdefault(what, []).append(time.perf_counter() - start)

    def alone(function: Callable[[], Any]) -> Callable[[], Any]:
        return function if rank == 0 else lambda: None

    def export() -> int:
        return sum(tensor.nbytes for _, tensor in backend.weights())

    def copied() -> None:
        shutil.copytree(target, copy)
        for path in copy.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    weights = [torch.zeros(export() // 4)]
    for _ in range(rounds):
        timed("export", export)
        timed("copy in memory", alone(lambda: weights[0].clone()))
        timed("save", lambda: backend.save_checkpoint(target))
        timed("begin", lambda: backend.save_checkpoint(target, background=True))
        backend.wait_for_checkpoint()
        timed("copy to disk", alone(copied))
        timed("load", lambda: backend.load_checkpoint(target))
        timed("read", alone(lambda: [path.read_bytes() for path in target.iterdir()]))
        if rank == 0:
            shutil.rmtree(copy)
    if rank == 0:
        found["seconds"] = seconds
        found["bytes"] = (weights[0].nbytes, sum(path.stat().st_size for path in target.iterdir()))


if __name__ == "__main__":
    command(main, Options, plans=("", "dp_shard=2"), width=64, layers=2, rounds=1)

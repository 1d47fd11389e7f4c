"""The time of a checkpoint on two ranks whose writes are slowed, beside that in lock-step, where
every rank gathers each whole tensor, and waits while its owner writes it.

    python benchmarks/checkpoints.py

Lock-step is of the weights, and with megatron-core of AdamW's state, too, which FSDP2's ranks write
side by side anyway. Both are written in turns in the same run, with the same checks and files.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import command, quiet, saved_model
from parallel import become_rank, free_port
from torch import Tensor
from train_step import batch_of

from nemorl.models.tensor_files import CheckedWriter, Piece
from nemorl.parallel.checkpoint import CheckpointWriter, Contents, Pieces, shared_out
from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.pieces import contents_of
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.megatron.weights import MOMENTS
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.algorithms.sft import loss_fn

PLANS = {
    "FSDP2 2": ("dtensor", ParallelPlan(dp_shard=2)),
    "TP 2": ("dtensor", ParallelPlan(dp_shard=1, tp=2)),
    "megatron, DP 2": ("megatron", ParallelPlan(dp_shard=2)),
    "megatron, TP 2": ("megatron", ParallelPlan(dp_shard=1, tp=2)),
    "megatron, PP 2": ("megatron", ParallelPlan(dp_shard=1, pp=2)),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes."""

    plans: tuple[str, ...] = tuple(PLANS)
    """Of FSDP2 2, TP 2; megatron, DP 2; …"""
    width: int = 512
    """Of the model: 512 makes 32 M parameters."""
    layers: int = 8
    """Of the model."""
    speed: float = 40.0
    """MB/s that a rank writes."""
    rounds: int = 3
    """Turns of each; medians count."""


def main(options: Options) -> None:
    sizes = {"hidden": options.width, "layers": options.layers, "positions": 128}
    with saved_model(**sizes) as (folder, size):
        print(
            f"{size / 1e6:.1f} M parameters in float32, {options.speed:g} MB/s a rank; seconds in"
            " lock-step, side by side, and the ratio"
        )
        print(f"  {'':16}{'weights':>24}{'with AdamW’s state':>24}")
        for plan in options.plans:
            found = mp.get_context("spawn").Manager().dict()
            mp.spawn(measure, (plan, folder, options, free_port(), found), 2)
            cells = []
            for what in ("weights", "all"):
                together, apart = (statistics.median(times) for times in found[what])
                cells.append(f"{together:8.2f} {apart:7.2f} {apart / together:7.2f}")
            print(f"  {plan:16}{cells[0]:>24}{cells[1]:>24}", flush=True)


def measure(rank: int, name: str, folder: Path, options: Options, port: int, found: Any) -> None:
    quiet()
    torch.set_num_threads(1)
    become_rank(rank, 2, port)
    kind, plan = PLANS[name]
    backend = MegatronBackend() if kind == "megatron" else DTensorBackend()
    backend.setup(
        BackendConfig(
            model=ModelConfig(path=str(folder / "model")),
            trainer=TrainerConfig(device="cpu"),
            parallel=plan,
            optimizer=OptimizerConfig(),
        )
    )
    slow_down(options.speed * 1e6)
    writer = CheckpointWriter(backend.world)
    shapes = {name: tuple(tensor.shape) for name, tensor in backend.weights()}
    target = folder / name

    def lock_step() -> None:
        state = {"step": backend.step, "base": ""}
        writer.save(in_lock_step(backend, shapes), target, state=state)

    def seconds(function: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - start

    for what in ("weights", "all"):
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            times[0].append(seconds(lock_step))
            times[1].append(seconds(lambda: backend.save_checkpoint(target)))
        if rank == 0:
            found[what] = times
        backend.train_step(batch_of([16] * 4), loss_fn)


def slow_down(speed: float) -> None:
    """Let this process write so many bytes a second."""
    write = CheckedWriter.write

    def slowly(self: CheckedWriter, data: Any) -> None:
        start = time.perf_counter()
        write(self, data)
        left = memoryview(data).nbytes / speed - (time.perf_counter() - start)
        time.sleep(max(0.0, left))

    CheckedWriter.write = slowly  # type: ignore[method-assign]


def in_lock_step(backend: Any, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """What earlier versions wrote: whole tensors, gathered while they are written.

    shapes: of the weights by name, in the order in which they are gathered.
    """
    if isinstance(backend, DTensorBackend):
        contents = contents_of(backend.model, backend.optimizer, backend.world)
        return replace(contents, weights=whole(shapes, backend.weights(), backend.world))
    weights = whole(shapes, backend.weights(), backend.world)
    moments: Pieces = [], ()
    if backend.step:
        named = {f"{name}.{what}": shape for what in MOMENTS for name, shape in shapes.items()}
        values = chain(*(moments_of(backend, what) for what in MOMENTS))
        moments = whole(named, values, backend.world)
    return Contents(weights=weights, optimizer=moments, write_config=lambda path: None)


def moments_of(backend: MegatronBackend, what: str) -> Iterator[tuple[str, Tensor]]:
    def gathered(name: str) -> Tensor:
        parameter = backend._stages.get_parameter(name)
        state = backend.optimizer.state(parameter)
        return backend.optimizer.gathered(parameter, state.get(what))

    for name, tensor in backend.conversion.whole(gathered):
        yield f"{name}.{what}", tensor


def whole(
    shapes: Mapping[str, tuple[int, ...]], values: Iterable[tuple[str, Tensor]], world: Any
) -> Pieces:
    """Return this rank's share of whole tensors; all are gone through."""
    owners = shared_out({name: torch.Size(x).numel() for name, x in shapes.items()}, world.size)
    own = {name: shape for name, shape in shapes.items() if owners[name] == world.rank}
    pieces = [Piece(name, torch.float32, x, (0,) * len(x)) for name, x in own.items()]
    return pieces, (value for name, value in values if name in own)


if __name__ == "__main__":
    command(main, Options, plans=("FSDP2 2", "megatron, DP 2"), width=64, layers=2, rounds=1)

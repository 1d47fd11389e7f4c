"""What training by megatron-core costs: a step of one rank against the other backend, the way of
weights into ranks and into a checkpoint, and how long stages of a pipeline wait for each other.

    python benchmarks/megatron_core.py

Steps: both backends on one rank, in turns in one process, on the same model and tokens. Weights:
read from a Hugging Face folder into megatron-core's parameters, and written into a checkpoint, of
which each rank writes its pieces, against a copy of the file. Pipeline: stages whose layers sleep
instead of computing, as a device would that is busy, so that cores which the ranks share don't
count; against a single stage.

(A script named megatron.py would be imported in the package's place.)
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import command, interleaved, median_ratio, quiet, save_model
from parallel import become_rank, free_port
from torch import Tensor
from train_step import batch_of, our_step

from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.algorithms.sft import loss_fn


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes."""

    hidden: int = 256
    """Width of the model whose steps are timed."""
    num_sequences: int = 32
    """Of a step, in one forward pass."""
    length: int = 256
    """Of each sequence."""
    rounds: int = 9
    """Turns of each; medians count."""
    wide: int = 1024
    """Width of the model whose weights are moved: 1024 makes 127 M parameters."""
    tps: tuple[int, ...] = (1, 2)
    """Degrees of tensor parallelism for these."""
    pps: tuple[int, ...] = (2, 4)
    """Degrees of the pipeline."""
    vpps: tuple[int, ...] = (1, 2)
    """Parts of the layers on each of its devices."""
    micro_batches: tuple[int, ...] = (4, 16)
    """That go through it in a step."""
    wait: float = 0.2
    """Seconds that a device's layers sleep forward; backward twice as long."""
    laps: int = 3
    """Steps of the pipeline, whose median counts."""


def main(options: Options) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as name:
        steps(options, Path(name) / "timed")
        weights(options, Path(name) / "moved")
        pipeline(options, Path(name))


def on_ranks(function: Callable[..., None], size: int, *args: Any) -> dict[str, Any]:
    """Return what `function(rank, size, port, found, *args)` leaves in `found`."""
    found = mp.get_context("spawn").Manager().dict()
    mp.spawn(function, (size, free_port(), found, *args), size)
    return dict(found)


def begin(rank: int, size: int, port: int) -> None:
    quiet()
    torch.set_num_threads(1)
    become_rank(rank, size, port)


def steps(options: Options, folder: Path) -> None:
    size = save_model(folder, hidden=options.hidden, positions=options.length)
    print(
        f"{size / 1e6:.1f} M parameters, {options.num_sequences} sequences of {options.length}"
        f" tokens, {torch.get_num_threads()} threads"
    )
    batch, trainer = batch_of([options.length] * options.num_sequences), TrainerConfig(device="cpu")
    become_rank(0, 1, free_port())
    backend = MegatronBackend(load_causal_lm(str(folder)))
    backend.setup(BackendConfig(trainer=trainer, optimizer=OptimizerConfig(lr=1e-5)))
    theirs = our_step(load_causal_lm(str(folder)), batch, trainer)
    ours, dtensor = interleaved(
        [lambda: backend.train_step(batch, loss_fn), theirs], options.rounds
    )
    print(
        f"  megatron {statistics.median(ours):.3f} s a step, dtensor"
        f" {statistics.median(dtensor):.3f} s, time / dtensor {median_ratio(dtensor, ours):.3f}"
    )
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def weights(options: Options, folder: Path) -> None:
    size = 4 * save_model(folder, hidden=options.wide, layers=8)
    print(f"weights of {size / 1e9:.2f} GB, in GB/s (of a copy of the file)")
    for tp in options.tps:
        seconds = on_ranks(move, tp, tp, folder, options.rounds)
        times = {what: statistics.median(values) for what, values in seconds.items()}
        times["there and back"] = times["there"] + times["back"]
        cells = (
            f"{what} {size / times[what] / 1e9:.2f} ({times['copy'] / times[what]:.2f})"
            for what in ("there", "back", "there and back")
        )
        print(f"  TP {tp}: {', '.join(cells)}; copy {size / times['copy'] / 1e9:.2f}", flush=True)


def move(rank: int, size: int, port: int, found: Any, tp: int, folder: Path, rounds: int) -> None:
    """Seconds of each way, and of a copy, in turns."""
    begin(rank, size, port)
    back, copy = folder.with_name("back"), folder.with_name("copy")
    config = BackendConfig(
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(device="cpu"),
        parallel=ParallelPlan(tp=tp),
    )
    seconds: dict[str, list[float]] = {"there": [], "back": [], "copy": []}

    def timed(what: str, function: Callable[[], Any]) -> None:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        function()
        seconds[what].append(time.perf_counter() - start)

    def copied() -> None:
        if rank == 0:
            shutil.copyfile(folder / "model.safetensors", copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())

    for _ in range(rounds + 1):
        backend = MegatronBackend()
        timed("there", lambda: backend.setup(config))  # noqa: B023
        timed("back", lambda: backend.save_checkpoint(back))  # noqa: B023
        timed("copy", copied)
        backend.shutdown()
    if rank == 0:
        found.update({what: values[1:] for what, values in seconds.items()})


def pipeline(options: Options, folder: Path) -> None:
    print(
        f"pipeline, each device {options.wait * 1e3:.0f} ms forward and {options.wait * 2e3:.0f} ms"
        " backward: time of a step / of one device alone"
    )
    alone: dict[int, float] = {}
    for pp, vpp in ((1, 1), *product(options.pps, options.vpps)):
        own = folder / f"stages-{pp * vpp}"
        save_model(own, layers=pp * vpp)
        times = on_ranks(stages, pp, vpp, own, options)["seconds"]
        alone = alone or times
        for count, seconds in times.items() if pp > 1 else ():
            theory = 1 + (pp - 1) / (vpp * count)
            print(
                f"  PP {pp}, VPP {vpp}, {count} microbatches: {seconds / alone[count]:.3f}, theory"
                f" {theory:.3f}",
                flush=True,
            )


def stages(
    rank: int, size: int, port: int, found: Any, vpp: int, folder: Path, options: Options
) -> None:
    """Seconds of forward and backward pass by the number of microbatches."""
    begin(rank, size, port)
    backend = MegatronBackend()
    backend.setup(
        BackendConfig(
            model=ModelConfig(path=str(folder)),
            trainer=TrainerConfig(device="cpu", train_micro_batch_size=1),
            parallel=ParallelPlan(pp=size, vpp=vpp),
        )
    )
    for stage in backend._stages:
        stage.decoder.layers[0].forward = Sleeping(options.wait / vpp)
    times = {}
    for count in options.micro_batches:
        batch = batch_of([8] * count)
        seconds = interleaved([lambda: backend.forward_backward(batch, loss_fn)], options.laps)[0]  # noqa: B023
        times[count] = statistics.median(seconds)
    if rank == 0:
        found["seconds"] = times


@dataclass(frozen=True)
class Sleeping:
    """Stands for a layer's forward."""

    seconds: float

    def __call__(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return Sleep.apply(hidden_states, self.seconds), None


class Sleep(torch.autograd.Function):
    """Sleeps forward, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


if __name__ == "__main__":
    command(
        main,
        Options,
        hidden=32,
        num_sequences=4,
        length=32,
        rounds=1,
        wide=64,
        tps=(2,),
        pps=(2,),
        micro_batches=(2,),
        wait=0.01,
        laps=1,
    )

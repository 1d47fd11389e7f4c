"""What spreading a model costs and saves: a step under the full machinery at degree 1 against plain
PyTorch, and memory per rank as degrees grow.

    python benchmarks/parallel.py

Time: FSDP2 over one rank, DTensors, log-probabilities and entropy by the chunked head, against the
plainest PyTorch loop on the same model and tokens, in turns in one process. Memory: in each rank
the bytes of parameters, gradients and optimizer state that it holds, counted, and the growth of its
resident memory up to its peak, for one process and for 2 and 4.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from common import command, interleaved, median_ratio, quiet, save_model
from torch import Tensor
from train_step import batch_of, our_step, plain_step

from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.measure import main_memory_peak
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.algorithms.sft import loss_fn

PLANS = {
    "one process": ParallelPlan(),
    "FSDP2 over 2": ParallelPlan(dp_shard=2),
    "FSDP2 over 4": ParallelPlan(dp_shard=4),
    "TP 2": ParallelPlan(tp=2),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes."""

    hidden: int = 256
    """Width of the model that is timed."""
    layers: int = 4
    """Of the model that is timed."""
    num_sequences: int = 32
    """Of a step, in one forward pass."""
    length: int = 256
    """Of each sequence."""
    rounds: int = 9
    """Turns of each; the median of their ratios counts."""
    wide: int = 1024
    """Width of the model whose memory is measured: 1024 makes 127 M parameters."""
    deep: int = 8
    """Its layers."""
    ranks: int = 4
    """Plans with more ranks are left out."""


def main(options: Options) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as name:
        one_rank(options, Path(name) / "timed")
        memory(options, Path(name) / "measured")


def one_rank(options: Options, folder: Path) -> None:
    """In this process: first the plain backend, which must not find a rank's variables, then the
    same as the only rank.
    """
    size = save_model(
        folder, hidden=options.hidden, layers=options.layers, positions=options.length
    )
    print(
        f"{size / 1e6:.1f} M parameters, {options.num_sequences} sequences of {options.length}"
        f" tokens, {torch.get_num_threads()} threads"
    )
    batch, trainer = batch_of([options.length] * options.num_sequences), TrainerConfig(device="cpu")
    alone = our_step(load_causal_lm(str(folder)), batch, trainer)
    plain = plain_step(load_causal_lm(str(folder)), batch.input_ids, options.num_sequences)
    become_rank(0, 1, free_port())
    ranked = our_step(load_causal_lm(str(folder)), batch, trainer)
    times = interleaved([ranked, alone, plain], options.rounds)
    for what, ours in zip(
        ("FSDP2 over one rank", "one process, plain tensors"), times, strict=False
    ):
        print(
            f"  {what}: {statistics.median(ours):.3f} s a step, time / plain PyTorch loop"
            f" {median_ratio(times[2], ours):.3f}"
        )
    torch.distributed.destroy_process_group()
    del os.environ["WORLD_SIZE"]


def memory(options: Options, folder: Path) -> None:
    size = save_model(folder, hidden=options.wide, layers=options.deep, positions=options.length)
    print(
        f"memory of a training step, {size / 1e6:.0f} M parameters in float32, 4 sequences of"
        f" {options.length} tokens, in GB per rank"
    )
    print(
        f"  {'':14}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'of one process':>16}"
        f"{'peak growth':>13}{'of one process':>16}"
    )
    first: tuple[float, float] | None = None
    for name, plan in PLANS.items():
        if plan.num_ranks > options.ranks:
            continue
        found = mp.get_context("spawn").Manager().dict()
        mp.spawn(measure, (plan, folder, options.length, free_port(), found), plan.num_ranks)
        parameters, gradients, optimizer, growth = (
            max(parts) for parts in zip(*found.values(), strict=True)
        )
        held = parameters + gradients + optimizer
        first = first or (held, growth)
        parts = "".join(f"{part / 1e9:12.3f}" for part in (parameters, gradients, optimizer))
        print(
            f"  {name:14}{parts}{held / first[0]:16.3f}{growth / 1e9:13.3f}"
            f"{growth / first[1]:16.3f}",
            flush=True,
        )


def measure(
    rank: int, plan: ParallelPlan, folder: Path, length: int, port: int, found: Any
) -> None:
    """Bytes of what this rank holds after a step, and how far its resident memory grew at most."""
    quiet()
    torch.set_num_threads(1)
    if plan.num_ranks > 1:
        become_rank(rank, plan.num_ranks, port)
        from nemorl.parallel.dtensor import titan  # noqa: F401  # imports are not counted
    backend = DTensorBackend()
    before = main_memory_peak()
    config = BackendConfig(
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(device="cpu"),
        optimizer=OptimizerConfig(),
        parallel=plan,
    )
    backend.setup(config)
    batch = batch_of([length] * 4)
    for _ in range(2):
        backend.train_step(batch, loss_fn)
    parameters = list(backend.model.parameters())
    states = [
        value
        for state in backend.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    sizes = [
        sum(map(nbytes, tensors))
        for tensors in (parameters, [p.grad for p in parameters if p.grad is not None], states)
    ]
    found[rank] = (*sizes, main_memory_peak() - before)


def nbytes(tensor: Tensor) -> int:
    """Of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def become_rank(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    command(
        main,
        Options,
        hidden=32,
        layers=2,
        num_sequences=4,
        length=32,
        rounds=1,
        wide=64,
        deep=2,
        ranks=2,
    )

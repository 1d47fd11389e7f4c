"""An optimizer step in bfloat16 on packed rows: speed, MFU, peak memory, and what the host waits
for; in turns with the plainest PyTorch loop, and against TRL's SFT trainer.
"""

import itertools
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sft_vs_trl
import torch
from common import interleaved, median_ratio, silence, skewed_lengths
from parallel import become_rank, free_port
from train_step import batch_of, plain_step

from benchmarks.gpu.models import PEERS, config_of, random_model, trainer
from benchmarks.gpu.part import Measurements, Row, Skip, require_memory, require_package, row
from nemorl.losses.types import finalize
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import PlannedStep
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.runtime.algorithms.sft import loss_fn

BFLOAT16 = ParallelPlan(param_dtype="bfloat16")
PLANS = {
    f"{'compiled' if compiled else 'eager'}, recompute {how}": replace(
        BFLOAT16,
        compile=compiled,
        activation_checkpointing=how,  # type: ignore[arg-type]
    )
    for how in ("none", "selective", "full")
    for compiled in (False, True)
}


def measurements(small: bool) -> Measurements:
    shapes = ("small",) if small else ("1.5B", "0.5B", "7B")
    # Once this process is a rank it remains one, and TRL would use DDP: ranks come last.
    for ranks in (False,) if small else (False, True):
        for shape, (how, plan) in itertools.product(shapes, PLANS.items()):
            if plan.needs_ranks == ranks:
                what = f"{shape}, {how}"
                yield what, partial(step, what, shape, plan, small)
        if not ranks:
            yield "skewed lengths", partial(skewed, shapes[-1 if small else 1], small)
            yield "synchronizations", partial(synchronizations, small)
            yield "TRL", partial(trl, small)


def batch(rows: int, small: bool) -> Any:
    """Rows of eight sequences."""
    return batch_of([16 if small else 1024] * 8 * rows)


def fitting_trainer(shape: str, plan: ParallelPlan, small: bool) -> DTensorBackend:
    """Raises Skip where the planner says that the model does not fit."""
    width, config = 128 if small else 8192, config_of(shape)
    work = PlanConfig(gpus=1, seq_len=width)
    memory = PlannedStep(model_shape(config), plan.on(1), work).training_memory()
    require_memory(memory.total, small)
    return trainer(random_model(config, "cpu" if small else "cuda"), width, parallel=plan)


def step(what: str, shape: str, plan: ParallelPlan, small: bool) -> Iterator[Row]:
    rows, rounds = (2, 1) if small else (4, 5)
    data = batch(rows, small)
    if plan.needs_ranks and "RANK" not in os.environ:
        become_rank(0, 1, free_port())
    made = fitting_trainer(shape, plan, small)
    measured: list[dict[str, float]] = []

    def ours() -> None:
        measured.append(finalize(made.train_step(data, loss_fn)))

    interleaved([ours], rounds)
    found = measured[1:]
    seconds = statistics.median(each["trainer/seconds"] for each in found)
    speed = data.num_tokens / seconds
    note = f"{speed:,.0f} tokens/s, {found[-1]['trainer/memory_gb']:.1f} GB at the peak"
    goal = 0.5 if shape == "1.5B" and plan.activation_checkpointing == "none" else None
    if "trainer/mfu" in found[0]:
        mfu = statistics.median(each["trainer/mfu"] for each in found)
        yield row(f"{what}: MFU", mfu, at_least=goal, note=note)
    else:
        yield row(f"{what}: tokens/s", speed, note=note)
    if plan == BFLOAT16:
        yield against_plain(what, made, data, rounds)
    made.shutdown()


def skewed(shape: str, small: bool) -> Iterator[Row]:
    """Log-normal lengths, others in each step, in turns with rows of eight equal sequences: what
    new shapes cost.
    """
    rows, rounds = (2, 2) if small else (4, 5)
    made, equal = fitting_trainer(shape, BFLOAT16, small), batch(rows, small)
    room = 0.95 * equal.num_tokens  # or a row more would be nearly empty
    sizes = {"mean": 12, "longest": 120} if small else {"mean": 1240, "longest": 8192}
    drawn = (skewed_lengths(equal.num_tokens, **sizes, seed=seed) for seed in itertools.count())
    batches = (batch_of(lengths[: sum(np.cumsum(lengths) <= room)]) for lengths in drawn)
    measured: dict[str, list[float]] = {"equal": [], "skewed": []}
    mfu: list[float] = []

    def train(kind: str, data: Any) -> None:
        found = finalize(made.train_step(data, loss_fn))
        measured[kind].append(data.num_tokens / found["trainer/seconds"])
        if kind == "skewed" and "trainer/mfu" in found:
            mfu.append(found["trainer/mfu"])

    interleaved([lambda: train("equal", equal), lambda: train("skewed", next(batches))], rounds)
    equally, found = (measured[kind][1:] for kind in ("equal", "skewed"))
    note = f"{statistics.median(found):,.0f} tokens/s"
    if mfu:
        note = f"{note}, MFU {statistics.median(mfu[1:]):.2f}"
    what = f"{shape}, new lengths in each step: × the speed of equal ones"
    yield row(what, median_ratio(equally, found), at_least=None if small else 0.85, note=note)
    made.shutdown()


def against_plain(what: str, made: DTensorBackend, data: Any, rounds: int) -> Row:
    """The same model and optimizer; the loop with as many sequences a pass as suit it best."""
    ids = data.input_ids.to(made.device)
    found: dict[int, float] = {}
    for size in (8, 2):
        plain = plain_step(made.model, ids, size, optimizer=made.optimizer, bfloat16=True)
        try:
            times = interleaved([lambda: made.train_step(data, loss_fn), plain], rounds)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        found[size] = median_ratio(*times)
    if not found:
        raise Skip("the plain loop needs more memory than there is")
    best = min(found, key=lambda size: found[size])
    note = f"which is fastest with {best} sequences a pass"
    return row(f"{what}: × the plain loop's speed", found[best], at_least=1, note=note)


def synchronizations(small: bool) -> Iterator[Row]:
    """Between microbatches: what five make more than one."""
    if small:
        raise Skip("counts what CUDA's host waits for")
    made, counts = fitting_trainer("0.5B", BFLOAT16, small), []
    places: Counter[str] = Counter()
    for rows in (1, 1, 5):  # the first warms up
        data = batch(rows, small)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made.train_step(data, loss_fn)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if "synchroniz" in str(each.message)]
        places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)
        counts.append(len(waits))
    note = ", ".join(f"{place} {count}" for place, count in places.most_common(6))
    what = "host synchronizations a microbatch"
    yield row(what, (counts[2] - counts[1]) / 4, at_most=0, note=f"in five: {note}")


def trl(small: bool) -> Iterator[Row]:
    require_package("trl")
    sizes = {**PEERS, "mean": 512, "longest": 4096}
    if small:
        sizes = {"num_examples": 8, "batch": 4, "mean": 16, "longest": 32, "rounds": 1}
    with silence():
        found = sft_vs_trl.compare(sft_vs_trl.Options(**sizes))
    peers = {name: value for name, value in found.items() if name.startswith("TRL")}
    fastest = min(peers, key=lambda name: peers[name][1])
    note = f"{fastest}: {peers[fastest][0]:,.0f} tokens/s"
    yield row("SFT, × the speed of TRL's fastest", peers[fastest][1], at_least=1.3, note=note)

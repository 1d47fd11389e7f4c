"""The largest models that train here, as `nemorl plan` predicts them, and their offloading."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from common import interleaved
from train_step import batch_of

from benchmarks.gpu.models import config_of, random_model, trainer
from benchmarks.gpu.part import Measurements, Row, Skip, row
from nemorl.losses.policy import clipped
from nemorl.parallel.config import LoRAConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import PlannedStep
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.runtime.algorithms.sft import loss_fn
from tests.parallel.measured_steps import Allocations

PLAN = ParallelPlan(param_dtype="bfloat16", activation_checkpointing="full", dp_shard=1)


def measurements(small: bool) -> Measurements:
    work = PlanConfig(gpus=1, seq_len=128 if small else 8192)
    kinds = {
        "SFT": work,
        "LoRA-SFT": replace(work, lora=LoRAConfig(rank=16)),
        "GRPO with a reference": replace(work, keep_reference=True),
    }
    for kind, settings in kinds.items():
        yield kind, partial(largest, kind, settings, small)


def policy_loss(output: Any, part: Any) -> Any:
    ones = torch.ones_like(output.token_logprobs)
    before = output.token_logprobs.detach()
    return clipped(output.token_logprobs, before, ones, part.loss_weights)


def largest(kind: str, work: PlanConfig, small: bool) -> Iterator[Row]:
    """Train two steps of the deepest model that should fit; the second one's peak counts."""
    device = "cpu" if small else "cuda"
    shape = "small" if small else "7B"
    room = 6e6 if small else 0.9 * torch.cuda.mem_get_info()[0]

    def deep(layers: int) -> tuple[Any, float]:
        config = config_of(shape, num_hidden_layers=layers)
        predicted = PlannedStep(model_shape(config), PLAN, work).training_memory().total
        return config, predicted

    layers = 1
    while deep(layers + 1)[1] <= room:
        layers += 1
    config, predicted = deep(layers)
    if predicted > room:
        raise Skip(f"one layer needs {predicted / 1e9:.1f} GB, and {room / 1e9:.1f} may be used")
    with Allocations() if small else nullcontext() as recorded:
        made = trainer(
            random_model(config, device),
            work.seq_len,
            parallel=PLAN,
            lora=work.lora,
            keep_reference=work.keep_reference,
        )
        data = batch_of([work.seq_len // 8] * 16)
        step = partial(made.train_step, data, policy_loss if work.keep_reference else loss_fn)
        step()
        begin = time.time_ns()
        if not small:
            torch.cuda.reset_peak_memory_stats()
        step()
        end = time.time_ns()
    measured = recorded.peak(begin, end) if recorded else torch.cuda.max_memory_allocated()
    size = sum(p.numel() for p in made.model.parameters())
    note = f"{size / 1e9:.3g} B parameters in {layers} layers: {measured / 1e9:.3g} GB at the peak"
    ratio = measured / predicted
    yield row(f"{kind}: peak, × the plan's", ratio, at_least=0.9, at_most=1.1, note=note)
    if kind == "SFT":
        yield offloading(made, small)


def offloading(made: Any, small: bool) -> Row:
    """To main memory and back; the round that pins that memory is not counted."""
    away, back = map(median, interleaved([made.offload, made._away.restore], 3))
    made.offload()
    size, left = made._away.nbytes / 1e9, 0.0 if small else torch.cuda.memory_allocated() / 1e9
    note = f"{size:.3g} GB away in {away:.2g} s, back in {back:.2g} s, {left:.2g} GB stay"
    return row("offloading, GB/s", 2 * size / (away + back), note=note)

"""Recomputation by module: computed twice, to the same bits."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import LENGTHS, start, weights
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

PARTS = {
    "core_attn": lambda layer: layer.self_attention.core_attention,
    "mlp": lambda layer: layer.mlp.linear_fc1,
    "moe": lambda layer: layer.mlp.router,
}
"""A module of each part that can be recomputed."""
KINDS = {
    "qwen3": [(), ("core_attn",), ("mlp",), ("core_attn", "mlp")],
    "qwen3_moe": [(), ("core_attn",), ("moe",), ("core_attn", "moe")],
}
Found = tuple[dict[str, Tensor], dict[str, int]]
"""Weights after a step, and how often each part was computed in it."""


def step(folder: Path, modules: tuple[str, ...], *, experts: Tensor | None) -> Found:
    how: Any = {"activation_checkpointing": "selective" if modules else "none"}
    plan = ParallelPlan(dp_shard=1, pp=2, recompute_modules=modules, **how)
    trainer = TrainerConfig(
        device="cpu", train_micro_batch_size=2, router_replay=experts is not None
    )
    backend = start("pp 2", folder, trainer=trainer, parallel=plan)
    counts = Counter[str]()
    for layer in backend._stages[0].decoder.layers:
        for name, part in PARTS.items():
            if name != ("mlp" if experts is not None else "moe"):
                part(layer).register_forward_hook(lambda *_, name=name: counts.update([name]))
    backend.train_step(replace(random_batch(LENGTHS), routed_experts=experts), nll_loss)
    found = weights(backend), dict(counts)
    backend.shutdown()
    return found


def steps(folder: Path, kind: str) -> list[Found]:
    experts = None
    if kind == "qwen3_moe":  # other ones in each microbatch
        generator = torch.Generator().manual_seed(0)
        sizes = len(LENGTHS), max(LENGTHS), 4, 4
        experts = torch.rand(sizes, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    return [step(folder, modules, experts=experts) for modules in KINDS[kind]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recomputed_has_the_same_bits(kind: str, tmp_path: Path):
    tiny_model(kind, scale=2.0, num_hidden_layers=4).save_pretrained(tmp_path)
    of_ranks = run_ranks(2, partial(steps, kind=kind), tmp_path)
    for (expected, once), *others in of_ranks:
        for modules, (found, counts) in zip(KINDS[kind][1:], others, strict=True):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert counts == {name: n * (1 + (name in modules)) for name, n in once.items()}

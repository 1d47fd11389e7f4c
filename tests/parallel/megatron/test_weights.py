"""Weights go from Hugging Face to megatron-core and back, bit for bit, over every split."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nemorl.models.adapters import live_tensors
from nemorl.models.stored import as_stored, stored_names
from nemorl.parallel.megatron.backend import _box
from nemorl.parallel.megatron.weights import Conversion, fused, split
from nemorl.parallel.plan import ParallelPlan
from tests.ranks import run_ranks
from tests.tiny_models import EXPERTS, KINDS, OTHERS, tiny_model

PLANS = (
    ParallelPlan(dp_shard=1, tp=2, pp=2),
    ParallelPlan(dp_shard=1, tp=4),  # more than key-value heads
    ParallelPlan(dp_shard=2, pp=2),
    ParallelPlan(dp_shard=2, pp=2, vpp=2),
    ParallelPlan(dp_shard=1, cp=2, tp=2),
    ParallelPlan(dp_shard=2, pp=2, vpp=2, ep=2),
    ParallelPlan(dp_shard=2, tp=2, ep=4),
)


def odd_numbers(model: nn.Module) -> dict[str, Tensor]:
    """All sorts of bits under the model's names: infinities, zeros with a sign, no numbers."""
    generator = torch.Generator().manual_seed(0)

    def bits(shape: torch.Size) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return drawn.to(torch.int32).view(torch.float32)

    return {name: bits(tensor.shape) for name, tensor in live_tensors(model).items()}


def make(kind: str, tied: bool) -> nn.Module:
    sizes = {"vocab_size": 44, "num_hidden_layers": 4}
    return tiny_model(kind, tied=tied, **sizes)


def stored(model: nn.Module) -> dict[str, Tensor]:
    return dict(as_stored(odd_numbers(model).items(), stored_names(model)))


def there_and_back(plan: ParallelPlan, kind: str, tied: bool) -> None:
    from nemorl.parallel.megatron.mesh import join

    model, world = make(kind, tied), join(plan, "cpu")
    given = stored(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    conversion = Conversion(model.config, shapes, world)
    own = {
        name: conversion.own(entry, partial(_box, given)) for name, entry in conversion.here.items()
    }
    found = dict(conversion.whole(own.__getitem__))
    assert list(found) == conversion.order() and found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


def all_of(plan: ParallelPlan) -> None:
    for kind in sorted(EXPERTS if plan.ep > 1 else {**KINDS, **EXPERTS, **OTHERS}):
        for tied in (True, False):
            there_and_back(plan, kind, tied)


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"tp {plan.tp} pp {plan.pp} vpp {plan.vpp} ep {plan.ep}"
)
def test_weights_go_there_and_back(plan: ParallelPlan):
    run_ranks(4, all_of, plan)


@pytest.mark.parametrize("kind", ["qwen3", *EXPERTS, *OTHERS])
def test_tensors_have_the_names_of_files(kind: str, tmp_path: Path):
    """As transformers writes them, which has a mixture's experts in one tensor itself."""
    model = make(kind, tied=False)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = dict(as_stored(live_tensors(model).items(), stored_names(model)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_queries_keys_and_values_are_joined_by_group():
    parts = [torch.randn(8 * 3, 5), torch.randn(2 * 3, 5), torch.randn(2 * 3, 5)]
    for found, given in zip(split(fused(parts, 2), 2, 4), parts, strict=True):
        assert torch.equal(found, given)
    whole = fused(parts, 2)
    assert torch.equal(whole[:12], parts[0][:12]) and torch.equal(whole[12:15], parts[1][:3])

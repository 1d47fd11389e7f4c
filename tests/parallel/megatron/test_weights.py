"""Weights go from Hugging Face to megatron-core and back, bit for bit, over every split."""

from collections import Counter
from functools import partial
from itertools import pairwise
from operator import add
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nemorl.models.adapters import live_tensors
from nemorl.models.tensor_files import as_stored, stored_names
from nemorl.parallel.megatron.backend import _box
from nemorl.parallel.megatron.weights import Conversion
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
    ParallelPlan(dp_shard=1, pp=4),
    ParallelPlan(dp_shard=2, pp=2, ep=2, num_layers_in_first_pipeline_stage=4),
    ParallelPlan(dp_shard=2, tp=2, ep=4),
)
NAMES = [f"tp {plan.tp} pp {plan.pp} vpp {plan.vpp} ep {plan.ep}" for plan in PLANS]


def odd_numbers(model: nn.Module) -> dict[str, Tensor]:
    """All sorts of bits under the model's names: infinities, zeros with a sign, no numbers."""
    generator = torch.Generator().manual_seed(0)

    def bits(shape: torch.Size) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return drawn.to(torch.int32).view(torch.float32)

    return {name: bits(tensor.shape) for name, tensor in live_tensors(model).items()}


def make(kind: str, tied: bool) -> nn.Module:
    sizes = {"vocab_size": 44, "num_hidden_layers": 5}
    return tiny_model(kind, tied=tied, **sizes)


def stored(model: nn.Module) -> dict[str, Tensor]:
    return dict(as_stored(odd_numbers(model).items(), stored_names(model)))


class Spans:
    """As an optimizer has them: each rank that shares a parameter a part of it, cut anywhere."""

    def __init__(self, own: dict[str, Tensor], conversion: Conversion, seed: int) -> None:
        from nemorl.parallel.megatron.core import parallel_state as state

        shared = state.get_data_parallel_group(with_context_parallel=True)
        experts = state.get_expert_data_parallel_group()
        draw = Random(seed)  # of all ranks the same
        self.spans: dict[int, slice] = {}
        self.values: dict[int, Tensor] = {}
        for name, tensor in own.items():
            group = shared if conversion.here[name].divided else experts
            cuts = [round(draw.random() * tensor.numel()) for _ in range(group.size() - 1)]
            begin, end = list(pairwise([0, *sorted(cuts), tensor.numel()]))[group.rank()]
            self.spans[id(tensor)] = slice(begin, end)
            self.values[id(tensor)] = tensor.flatten()[begin:end]

    def span(self, parameter: Tensor) -> slice | None:
        span = self.spans[id(parameter)]
        return span if span.start < span.stop else None

    def main(self, parameter: Tensor) -> Tensor:
        return self.values[id(parameter)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def converted(plan: ParallelPlan, kind: str, tied: bool) -> None:
    from nemorl.parallel.megatron.core import join
    from nemorl.parallel.megatron.weights import own_boxes, own_weights

    model, world = make(kind, tied), join(plan, "cpu")
    given = stored(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    conversion = Conversion(model.config, shapes, world)
    own = {
        name: nn.Parameter(conversion.own(entry, partial(_box, given)))
        for name, entry in conversion.here.items()
    }
    found = dict(conversion.whole(own.__getitem__))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert same_bits(found[name], tensor), name
    optimizer = Spans(own, conversion, seed=len(kind))
    stages = SimpleNamespace(named_parameters=own.items)
    pieces, values = own_weights(own_boxes(stages, optimizer, conversion), optimizer)
    for piece, value in zip(pieces, values, strict=True):
        assert same_bits(value, _box(given, piece.name, piece.offsets, piece.shape)), piece
    counts = Counter(piece.name for piece in pieces)
    # Files of some models have all queries, keys and values in one tensor, in another order.
    assert all(count <= (5 if "qkv" in name else 3) for name, count in counts.items())
    written = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for piece in world.merge_objects(pieces, add):
        _box(written, piece.name, piece.offsets, piece.shape).add_(1)
    for name, count in written.items():
        assert (count == 1).all(), name


def all_of(plan: ParallelPlan) -> None:
    for kind in sorted(EXPERTS if plan.ep > 1 else {**KINDS, **EXPERTS, **OTHERS}):
        for tied in (True, False):
            converted(plan, kind, tied)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_weights_go_there_and_back_and_each_number_is_in_one_piece_of_one_rank(plan: ParallelPlan):
    run_ranks(4, all_of, plan)


@pytest.mark.parametrize("kind", ["qwen3", *EXPERTS, *OTHERS])
def test_tensors_have_the_names_of_files(kind: str, tmp_path: Path):
    model = make(kind, tied=False)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = dict(as_stored(live_tensors(model).items(), stored_names(model)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

"""However a batch is cut, every token is somewhere once; and which layers stages have."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nemorl.data.batch import RankRoutes, TokenBatch
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.layout import Cutting, cut
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import random_batch

LAYOUTS = [
    {},
    {"train_micro_batch_size": 1},
    {"train_micro_batch_size": 3},
    {"micro_batch_tokens": 40},
    {"sequence_packing": True},
    {"sequence_packing": True, "packed_row_tokens": 48, "train_micro_batch_size": 1},
    {"sequence_packing": True, "micro_batch_tokens": 40},
]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(1, 5),
    multiple_of=st.sampled_from([1, 4, 6]),
)
def test_every_token_is_on_one_rank_and_comes_back(lengths, layout, num_ranks, multiple_of):
    batch = random_batch(lengths)
    found = cut(batch, TrainerConfig(**layout), num_ranks=num_ranks, multiple_of=multiple_of)
    parts = [found.parts(rank) for rank in range(num_ranks)]
    assert len({len(own) for own in parts}) == 1, "every rank makes as many passes"
    assert all(
        part.input_ids.shape[1] % multiple_of == 0 and len(part) for own in parts for part in own
    )
    assert sum(part.num_tokens for own in parts for part in own) == sum(lengths)
    weights = sum(part.loss_weights.double().sum() for own in parts for part in own)
    torch.testing.assert_close(weights, batch.loss_weights.double().sum())
    placed = sum(
        found.place([part.input_ids * (part.segment_ids > 0) for part in own], rank)
        for rank, own in enumerate(parts)
    )
    restored = found.restore(placed)
    assert torch.equal(restored, torch.where(batch.segment_ids > 0, batch.input_ids, 0))


def test_a_rank_without_rows_gets_padding_that_trains_nothing():
    batch = random_batch([5])
    (empty,) = cut(batch, TrainerConfig(), num_ranks=2, multiple_of=4).parts(1)
    assert empty.input_ids.shape == (1, 4)
    assert (
        not empty.segment_ids.any() and not empty.loss_mask.any() and not empty.loss_weights.any()
    )


@example(lengths=[1] * 12, layout={"sequence_packing": True}, num_ranks=2, count=4)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=12, max_size=20),
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(1, 3),
    count=st.integers(1, 4),
)
def test_microbatches_that_a_pipeline_asks_for_have_rows(lengths, layout, num_ranks, count):
    batch, config = random_batch(lengths), TrainerConfig(**layout)
    found = cut(batch, config, num_ranks=num_ranks, min_microbatches=count)
    for rank in range(num_ranks):
        parts = found.parts(rank)
        assert len(parts) >= count and all(part.num_tokens for part in parts[:count])


def test_without_settings_a_forward_pass_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nemorl.parallel.layout.MICRO_BATCH_TOKENS", 40)

    def sizes(batch, **settings):
        parts = cut(batch, TrainerConfig(**settings)).parts(0)
        return [tuple(part.input_ids.shape) for part in parts]

    assert sizes(random_batch([10] * 4)) == [(4, 10)]
    assert sizes(random_batch([10] * 9)) == [(4, 10), (4, 10), (1, 10)]
    assert sizes(random_batch([10] * 9), train_micro_batch_size=9) == [(9, 10)]
    assert sorted(sizes(random_batch([50, 10]))) == [(1, 10), (1, 50)]


LAYERS, TOPK = 4, 2
MODEL = SimpleNamespace(num_experts_per_tok=TOPK, num_local_experts=128)
PLANS = [
    ParallelPlan(dp_shard=1),
    ParallelPlan(dp_shard=2),
    ParallelPlan(dp_shard=2, pp=2),
    ParallelPlan(dp_shard=1, pp=2, vpp=2),
    ParallelPlan(dp_shard=3, tp=2, pp=4),
]


def cutting(plan: ParallelPlan, **trainer: object) -> Cutting:
    settings = TrainerConfig(router_replay=True, **trainer)
    return Cutting(trainer=settings, plan=plan, model=MODEL, layers=LAYERS)


def with_experts(batch: TokenBatch, *, few: bool = False) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    shape = *batch.input_ids.shape, LAYERS, TOPK
    experts = torch.randint(-1, 1 if few else 128, shape, generator=generator)
    return replace(batch, routed_experts=experts.to(torch.int16))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    layout=st.sampled_from(LAYOUTS),
    plan=st.sampled_from(PLANS),
)
def test_ranks_are_sent_the_routes_of_their_own_tokens_and_layers(lengths, layout, plan):
    batch, cuts = with_experts(random_batch(lengths)), cutting(plan, **layout)
    sent, whole = cuts.routes(batch), cuts.layout(batch)
    wholes = [whole.parts(rank) for rank in range(plan.data_ranks)]
    assert list(sent) == [(rank, at) for rank in range(plan.data_ranks) for at in range(plan.pp)]
    numbers = sum(routes.experts.numel() for routes in sent.values())
    assert numbers == sum(lengths) * LAYERS * TOPK, "each number is sent once, and no padding"
    without = replace(batch, routed_experts=None)
    for (rank, pp_rank), routes in sent.items():
        arrived = replace(without, routed_experts=routes)
        stages = plan.stages.layers(LAYERS)[pp_rank :: plan.pp]
        layers = [layer for stage in stages for layer in stage]
        for given_ in (arrived, batch):  # what the driver has sent, and what is cut here
            parts = cuts.own_layout(given_, (rank, pp_rank), replay=True).parts(rank)
            for part, before in zip(parts, wholes[rank], strict=True):
                real = before.segment_ids > 0
                expected = before.routed_experts[:, :, layers]
                assert torch.equal(part.routed_experts[real], expected[real])
                assert (part.routed_experts[~real] == -1).all()
    assert cuts.own_layout(arrived, (rank, 0), replay=False).rows.routed_experts is None


def test_routes_of_another_layout_are_refused():
    batch, cuts = with_experts(random_batch([5, 7])), cutting(ParallelPlan(dp_shard=2))
    routes = cuts.routes(batch)[1, 0]
    assert isinstance(routes, RankRoutes)
    arrived = replace(batch, routed_experts=routes)
    with pytest.raises(RuntimeError, match="ranks must cut a batch as its sender does"):
        cuts.own_layout(arrived, (0, 0), replay=True).parts(0)


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_stages_of_all_sizes_have_each_layer_once(pp: int, vpp: int):
    plan = ParallelPlan(pp=pp, vpp=vpp)
    for layers in range(plan.num_stages, 130):
        stages = plan.stages.layers(layers)
        counts = [len(stage) for stage in stages]
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        assert len(stages) == plan.num_stages and min(counts) > 0
        assert layers % plan.num_stages or len(set(counts)) == 1
        # No device waits for another for more than an end's layer's worth.
        assert max(counts) <= -(-(layers + 2) // plan.num_stages)
        of_devices = [sum(counts[rank::pp]) for rank in range(pp)]
        assert max(of_devices) - min(of_devices) <= 2


def test_large_models_have_shorter_stages_at_both_ends():
    """As Megatron's account_for_embedding_in_pipeline_split and ..loss."""
    for layers, pp, end in ((94, 4, 23), (94, 8, 11), (126, 8, 15), (126, 16, 7)):
        counts = [len(stage) for stage in ParallelPlan(pp=pp).stages.layers(layers)]
        assert counts == [end, *[end + 1] * (pp - 2), end]

"""However a batch is cut, every token is somewhere once, and comes back to its place."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.layout import cut
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

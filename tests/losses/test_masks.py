"""Reductions by hand: what each builder makes of small masks. (Laws 1 to 6 are in test_laws.py.)"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.masks import (
    constant_weights,
    group_mean_weights,
    sequence_mean_weights,
    token_mean_weights,
)
from nemorl.losses.types import (
    group_extremes,
    group_labels,
    group_sum,
    same_segment,
    segment_mean,
    segment_starts,
    segment_sum,
)

MASK = torch.tensor(
    [[False, True, True, False], [False, True, False, False], [False, False, False, False]]
)
PACKED_MASK = torch.tensor(
    [[False, True, True, False, True, False], [False, False, True, True, False, False]]
)
PACKED_SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 0, 0]])


def test_token_mean_counts_every_token_the_same():
    third = 1 / 3
    torch.testing.assert_close(
        token_mean_weights(MASK),
        torch.tensor([[0, third, third, 0], [0, third, 0, 0], [0, 0, 0, 0]]),
    )


def test_sequence_mean_of_packed_rows():
    # Sequences: 2 tokens, 1 token, none, 2 tokens. Three have any.
    expected = torch.tensor([[0, 1 / 6, 1 / 6, 0, 1 / 3, 0], [0, 0, 1 / 6, 1 / 6, 0, 0]])
    torch.testing.assert_close(sequence_mean_weights(PACKED_MASK, PACKED_SEGMENTS), expected)


def test_constant_length_counts_all_sequences_also_those_without_tokens():
    assert constant_weights(MASK, length=4).unique().tolist() == pytest.approx([0, 1 / 12])
    assert constant_weights(PACKED_MASK, PACKED_SEGMENTS, length=2).unique().tolist() == [0, 1 / 8]


def test_group_mean_of_rows_and_of_packed_tokens():
    # Group 9 has rows 0 and 2 (2 tokens), group -1 row 1 (1 token).
    assert group_mean_weights(MASK, torch.tensor([9, -1, 9])).tolist() == [
        [0, 0.25, 0.25, 0],
        [0, 0.5, 0, 0],
        [0, 0, 0, 0],
    ]
    # Sequences 1 and 4 are group 5 (4 tokens), sequence 2 is group 6 (1 token), sequence 3 is group
    # 7 (none), padding is 0.
    groups = torch.tensor([[5, 5, 5, 6, 6, 0], [7, 7, 5, 5, 0, 0]])
    assert group_mean_weights(PACKED_MASK, groups).tolist() == [
        [0, 0.125, 0.125, 0, 0.5, 0],
        [0, 0, 0.125, 0.125, 0, 0],
    ]


def test_a_mask_without_tokens_gives_zeros():
    nothing = torch.zeros_like(MASK)
    for weights in (
        token_mean_weights(nothing),
        sequence_mean_weights(nothing),
        sequence_mean_weights(nothing, torch.zeros_like(MASK, dtype=torch.long)),
        constant_weights(nothing, torch.zeros_like(MASK, dtype=torch.long), length=3),
        group_mean_weights(nothing, torch.tensor([1, 1, 2])),
        token_mean_weights(nothing[:0]),
        constant_weights(nothing[:0], length=3),
    ):
        assert not weights.any()


@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 6))
def test_weights_of_a_mean_sum_to_one(seed, batch, seq):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, seq, generator=generator) < 0.5
    groups = torch.randint(-3, 3, (batch,), generator=generator)
    for weights in (
        token_mean_weights(mask),
        sequence_mean_weights(mask),
        group_mean_weights(mask, groups),
    ):
        assert weights.sum().item() == pytest.approx(float(mask.any()))
        assert torch.equal(weights != 0, mask)


def test_segments():
    ids = torch.tensor([[1, 1, 2, 0, 0], [0, 1, 2, 2, 2]])
    assert same_segment(ids).int().tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert segment_starts(ids).int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 1, 0, 0]]
    values = torch.tensor([[1.0, 2.0, 3.0, 9.0, 9.0], [9.0, 4.0, 5.0, 6.0, 7.0]])
    assert segment_sum(values, ids).tolist() == [[3, 3, 3, 0, 0], [0, 4, 18, 18, 18]]
    assert segment_sum(values).tolist() == [[24] * 5, [31] * 5]
    mask = torch.tensor([[True, False, False, True, True], [True, True, True, False, True]])
    assert segment_mean(values, mask, ids).tolist() == [[1, 1, 0, 0, 0], [0, 4, 6, 6, 6]]
    assert same_segment(ids[:, :0]).shape == (2, 0) and segment_sum(
        values[:, :0], ids[:, :0]
    ).shape == (2, 0)


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 2), min_size=1, max_size=8))
def test_groups_are_told_apart_by_any_labels(ids):
    group_id = torch.tensor(ids)
    values = torch.arange(1.0, len(ids) + 1)
    labels = group_labels(group_id)
    assert labels.max() < len(ids)
    same = group_id[:, None] == group_id[None, :]
    assert torch.equal(labels[:, None] == labels[None, :], same)
    assert torch.equal(group_sum(values, labels), torch.where(same, values, 0.0).sum(1))
    low, high = group_extremes(values, labels)
    assert torch.equal(low, torch.where(same, values, torch.inf).amin(1)) and torch.equal(
        high, torch.where(same, values, -torch.inf).amax(1)
    )

"""Laws 2 and 15 for packing: nothing lost or doubled, capacities kept, pack and unpack inverse; how
tight the plans are.
"""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from nemorl.data.batch import take
from nemorl.data.packing import (
    num_segments,
    pack,
    pack_plan,
    segments_apart,
    unpack,
)
from tests.data.batches import SPECS, assert_equal, batch_of, built, each_array, tokens_of

WEIGHTS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), max_size=40)


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 9))
def test_plan_holds_every_index_once_within_capacity(lengths, spare, multiple):
    capacity = max([1, *lengths]) + spare - 1
    plan = pack_plan(lengths, capacity, num_rows_multiple=multiple)
    assert sorted(index for row in plan for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in plan)
    assert all(list(row) == sorted(row) for row in plan)
    assert len(plan) % multiple == 0
    filled = sum(length > 0 for length in lengths)
    assert sum(any(lengths[index] for index in row) for row in plan) == min(len(plan), filled), (
        "a row is empty although another could be split"
    )
    assert plan == pack_plan(
        torch.tensor(lengths, dtype=torch.int64),
        capacity,
        num_rows_multiple=multiple,
    )


def test_worked_plans():
    lengths = [6, 7, 3, 4, 2, 2]
    assert pack_plan(lengths, 10) == ((1, 2), (0, 3), (4, 5))
    assert pack_plan(lengths, 10, num_rows_multiple=4) == ((1,), (0, 3), (4, 5), (2,))
    assert pack_plan([5, 5], 10, num_rows_multiple=4) == ((0,), (1,), (), ())
    assert pack_plan([1, 2, 3], 6, num_rows_multiple=2) == (
        (2,),
        (0, 1),
    ), "halves of three tokens each"
    assert pack_plan([], 10, num_rows_multiple=4) == ()


@pytest.mark.parametrize(
    ("mean", "sigma", "capacity"), [(6.0, 1.0, 8192), (6.0, 1.0, 2048), (3.7, 0.8, 1024)]
)
def test_log_normal_lengths_pack_tight(mean: float, sigma: float, capacity: int):
    """100,000 lengths: at most 1 % above the lower bound."""
    lengths = np.random.default_rng(0).lognormal(mean, sigma, 100_000).astype(int) + 1
    lengths = np.minimum(lengths, capacity)
    assert len(pack_plan(lengths, capacity)) <= 1.01 * math.ceil(lengths.sum() / capacity)
    assert len(pack_plan([3] * 100_000, 5)) == 100_000


def assert_unpacked(packed, plan, batch):
    """Every array of the packed batch comes back; its segments are as they were numbered."""
    lengths, length = batch.lengths, batch.input_ids.shape[1]
    again = each_array(lambda array: unpack(array, plan, lengths, length=length), packed)
    segments = again.segment_ids
    first = segments.where(segments > 0, 2**40).amin(-1, keepdim=True) if length else segments
    assert_equal(replace(again, segment_ids=(segments - first + 1).where(segments > 0, 0)), batch)


@given(SPECS, st.integers(0, 20), st.integers(1, 4))
def test_unpack_undoes_pack(spec, spare, multiple):
    batch = built(spec)
    plan = pack_plan(batch.lengths, int(batch.lengths.max()) + spare, num_rows_multiple=multiple)
    packed = pack(batch, plan)
    assert tokens_of(packed) == tokens_of(batch)
    assert_unpacked(packed, plan, batch)


@given(SPECS, st.data())
def test_packed_rows_restart_positions_and_number_segments(spec, data):
    batch = built(spec)
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    plan = (tuple(order[:cut]), tuple(order[cut:]))
    packed = pack(batch, plan)
    for row, indices in enumerate(plan):
        expected = [
            (number, place)
            for number, index in enumerate(indices, 1)
            for place in range(int(batch.lengths[index]))
        ]
        width = packed.input_ids.shape[1]
        expected += [(0, 0)] * (width - len(expected))
        assert (
            list(
                zip(
                    packed.segment_ids[row].tolist(), packed.position_ids[row].tolist(), strict=True
                )
            )
            == expected
        )
        assert not packed.loss_mask[row][packed.segment_ids[row] == 0].any()


@st.composite
def several_per_row(draw):
    """Lengths of sequences and in which rows of a batch they stand, several in a row and in any
    order, with empty rows.
    """
    spec = draw(SPECS)
    order = draw(st.permutations(range(len(spec[0]))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=5)))
    return spec, tuple(
        tuple(order[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True)
    )


@given(several_per_row(), st.data())
def test_packing_twice_is_packing_once(drawn, data):
    """Rows of several segments, such as preference pairs, stay whole and come back bit for bit."""
    spec, rows = drawn
    batch = built(spec)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    plan = (tuple(order[:cut]), tuple(order[cut:]))
    together = tuple(tuple(index for row in part for index in rows[row]) for part in plan)
    before = pack(batch, rows)
    packed = pack(before, plan)
    assert_equal(packed, pack(batch, together))
    assert_unpacked(packed, plan, before)


def test_place_of_the_padding_does_not_matter():
    batch = batch_of([2], width=3)
    right = pack(batch, ((0,),))
    left = pack(each_array(lambda array: array.roll(1, 1), batch), ((0,),))
    assert left.input_ids.tolist() == right.input_ids.tolist()
    assert left.position_ids.tolist() == right.position_ids.tolist()


def test_gradients_and_trailing_dims_pass_through_unpack():
    values = torch.arange(8.0).reshape(1, 4, 2).requires_grad_()
    unpacked = unpack(values, ((1, 0),), [1, 2])
    assert unpacked.tolist() == [[[4.0, 5.0], [0.0, 0.0]], [[0.0, 1.0], [2.0, 3.0]]]
    unpacked.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[[1.0, 1.0]] * 3 + [[0.0, 0.0]]]


def test_errors_say_what_is_wrong():
    batch = batch_of([3, 1])
    packed = pack(batch, ((0, 1),))
    cases = [
        (lambda: pack_plan([3, 11], 10), "sequence 1 has 11 tokens, capacity is 10"),
        (lambda: pack_plan([3], 9, num_rows_multiple=0), "^num_rows_multiple must be at least 1"),
        (lambda: pack(batch, ((0,),)), "sequence 1 0 times"),
        (lambda: pack(batch, ((0, 1), (1,))), "sequence 1 2 times"),
        (lambda: pack(batch, ((0, -1),)), "sequence 1 0 times"),
        (
            lambda: unpack(packed.input_ids, ((0, 1),), [3, 1], length=2),
            "sequence 0 has 3 tokens, length is 2",
        ),
    ]
    for call, message in cases:
        with pytest.raises(Exception, match=message):
            call()


def test_rows_without_a_token_come_back():
    assert num_segments(torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 0]
    assert pack(take(batch_of([2]), []), ()).input_ids.shape == (0, 0)
    empty = batch_of([0, 0])
    packed = pack(empty, ((0, 1),))
    assert packed.input_ids.shape == (1, 0)
    assert_unpacked(packed, ((0, 1),), empty)


@given(several_per_row())
def test_segments_apart_pack_again(drawn):
    spec, rows = drawn
    batch = pack(built(spec), rows)
    apart, plan = segments_apart(batch)
    assert num_segments(apart.segment_ids).tolist() == [1] * len(apart)
    assert apart.lengths.sum() == batch.lengths.sum()
    assert_equal(pack(apart, plan), pack(batch, tuple((row,) for row in range(len(batch)))))

"""Law 15 for ranks and microbatches, the budgets they keep, and how even the shares are."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nemorl.data.batch import take, trim
from nemorl.data.packing import (
    QUADRATIC,
    balance,
    merge,
    pack,
    row_costs,
    shard_by_rank,
    split,
    split_microbatches,
)
from tests.data.batches import SPECS, assert_equal, batch_of, built, each_array, tokens_of


def every_row_once(plan, rows):
    return sorted(row for part in plan for row in part) == list(range(rows))


def assert_merged(parts, plan, batch):
    assert_equal(each_array(lambda *arrays: merge(arrays, plan), *parts), trim(batch))


@given(SPECS, st.integers(1, 9))
def test_merge_undoes_shard_by_rank(spec, num_ranks):
    batch = built(spec)
    plan = shard_by_rank(batch, num_ranks)
    assert len(plan) == num_ranks
    assert every_row_once(plan, len(batch))
    sizes = [len(rows) for rows in plan]
    assert max(sizes) - min(sizes) <= 1
    shards = split(batch, plan)
    assert tokens_of(*shards) == tokens_of(batch)
    assert_merged(shards, plan, batch)
    assert torch.equal(
        merge([shard.input_ids.sum(-1) for shard in shards], plan), batch.input_ids.sum(-1)
    )
    assert plan == shard_by_rank(batch, num_ranks)


@given(SPECS, st.integers(1, 5), st.integers(1, 9))
def test_merge_undoes_fixed_rows(spec, rows, at_least):
    batch = built(spec)
    plan = split_microbatches(batch, rows=rows, min_microbatches=at_least)
    assert len(plan) == max(at_least, -(-len(batch) // rows))
    assert max(map(len, plan)) <= rows
    assert every_row_once(plan, len(batch))
    assert min(map(len, plan)) > 0 or len(batch) < len(plan), (
        "a microbatch is empty although another could be halved"
    )
    assert_merged(split(batch, plan), plan, batch)


@given(SPECS, st.integers(0, 60), st.integers(1, 9))
def test_merge_undoes_a_token_budget(spec, spare, at_least):
    batch = built(spec)
    budget = max(spec[0]) + spare
    plan = split_microbatches(batch, token_budget=budget, min_microbatches=at_least)
    assert len(plan) >= at_least
    assert every_row_once(plan, len(batch))
    assert all(part.input_ids.numel() <= budget for part in split(batch, plan) if len(part))
    assert_merged(split(batch, plan), plan, batch)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(9, 60),
)
def test_a_token_budget_keeps_units_together_where_they_fit(sizes, budget):
    batch = batch_of([size for unit in sizes for size in unit])
    numbers = iter(range(len(batch)))
    units = tuple(tuple(next(numbers) for _ in unit) for unit in sizes)
    plan = split_microbatches(batch, token_budget=budget, units=units)
    assert every_row_once(plan, len(batch))
    assert all(part.input_ids.numel() <= budget for part in split(batch, plan))
    for unit, own in zip(units, sizes, strict=True):
        if len(own) * max(own) <= budget:
            assert sum(bool({*unit} & {*part}) for part in plan) == 1


def test_worked_shares():
    batch = batch_of([9, 1, 8, 2])
    assert row_costs(batch) == pytest.approx([x + x * x * QUADRATIC for x in (9, 1, 8, 2)])
    assert shard_by_rank(batch, 2) == ((0, 1), (2, 3))
    assert row_costs(batch_of([96]))[0] == 96 + 96 * 96 / 24576, (
        "what attention costs at a width of 2048"
    )
    assert balance([8, 7, 6, 5, 4, 2], 2) == ((0, 3, 4), (1, 2, 5))
    assert balance([5.0], 3) == ((0,), (), ())


def test_worked_microbatches():
    batch = batch_of([5, 1, 4, 2, 1])
    assert split_microbatches(batch, rows=2) == ((0, 1), (2, 3), (4,))
    assert split_microbatches(batch, token_budget=6) == ((0,), (2,), (1, 3, 4))
    assert split_microbatches(batch, token_budget=8) == ((0,), (2, 3), (1, 4))
    units = ((0,), (1, 2), (3, 4))
    assert split_microbatches(batch, token_budget=8, units=units) == ((0,), (1, 2), (3, 4))
    assert split_microbatches(batch, rows=3, min_microbatches=3) == ((0,), (1, 2), (3, 4))


def test_cost_is_of_segments_not_of_rows():
    packed = pack(batch_of([3, 2, 4]), ((0, 1), (2,)))
    assert row_costs(packed) == pytest.approx((5 + (9 + 4) * QUADRATIC, 4 + 16 * QUADRATIC))


def test_errors_say_what_is_wrong():
    batch = batch_of([3, 5])
    cases = [
        (lambda: split_microbatches(batch), "give one of rows"),
        (
            lambda: split_microbatches(batch, token_budget=4),
            "row 1 has 5 tokens, token_budget is 4",
        ),
        (lambda: merge([batch.input_ids], ((0, 0),)), "each once"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_batch_without_columns_costs_nothing():
    assert row_costs(batch_of([0, 0])) == (0.0, 0.0)


def test_rows_that_cost_nothing_are_spread_as_well():
    assert [len(part) for part in balance([0.0] * 5, 4)] == [2, 1, 1, 1]


def test_what_cannot_be_halved_is_followed_by_empty_ones():
    assert split_microbatches(batch_of([3]), rows=1, min_microbatches=3) == ((0,), (), ())
    assert split_microbatches(take(batch_of([3]), []), rows=2, min_microbatches=2) == ((), ())

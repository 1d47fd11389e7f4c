"""An order that neither repeats nor drops a row across a resume, of one set and of mixtures by
weight.
"""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nemorl.data.rows import BLOCK, Row, RowOrder, split_rows


def rows_at(num_rows, cursor, count, seed, shuffle=True):
    return RowOrder(sizes=(num_rows,), seed=seed, shuffle=shuffle).take(cursor, count)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_each_epoch_visits_each_row_once(num_rows, epochs, seed, shuffle):
    order = rows_at(num_rows, 0, num_rows * epochs, seed, shuffle)
    for epoch in range(epochs):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    if not shuffle:
        assert order == list(range(num_rows)) * epochs


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(rows_at(50, epoch * 50, 50, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


@given(st.integers(2, 30), st.data(), st.integers(0, 50))
def test_split_rows_shares_no_row(num_rows, data, seed):
    rows = [{"n": number} for number in range(num_rows)]
    count = data.draw(st.integers(1, num_rows - 1))
    train, held_out = split_rows(rows, validation=count, seed=seed)
    assert len(held_out) == count
    assert sorted([*train, *held_out], key=lambda row: row["n"]) == rows
    assert train == sorted(train, key=lambda row: row["n"])


@st.composite
def orders(draw, *, weighted: bool | None = None) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = (
        [draw(st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.0])) for _ in sizes]
        if (draw(st.booleans()) if weighted is None else weighted)
        else []
    )
    return {
        "sizes": tuple(sizes),
        "weights": tuple(weights),
        "seed": draw(st.integers(0, 2**40)),
        "shuffle": draw(st.booleans()),
    }


@given(orders(), st.integers(0, 2500), st.lists(st.integers(0, 60), max_size=6))
def test_a_resumed_order_is_the_uninterrupted_one(spec, start, counts):
    order = RowOrder(**spec)
    parts, cursor = [], start
    for count in counts:
        parts += order.take(cursor, count)
        cursor += count
    assert parts == order.take(start, sum(counts))
    assert all(0 <= row < order.num_rows for row in parts)


@given(orders(weighted=True), st.integers(1, 2300))
def test_each_set_of_a_mixture_neither_repeats_nor_drops_a_row_within_its_pass(spec, count):
    order = RowOrder(**spec)
    visited, first = order.take(0, count), 0
    assert len(visited) == count
    for size in order.sizes:
        own = [row - first for row in visited if first <= row < first + size]
        for begin in range(0, len(own), size):
            epoch = own[begin : begin + size]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < size or sorted(epoch) == list(range(size))
            assert order.shuffle or epoch == list(range(len(epoch)))
        first += size


@given(orders(weighted=True), st.integers(0, 3))
def test_each_block_of_a_mixture_meets_the_shares(spec, block):
    order = RowOrder(**spec)
    bounds = np.cumsum(order.sizes)
    sets = Counter(
        int(np.searchsorted(bounds, row, side="right")) for row in order.take(block * BLOCK, BLOCK)
    )
    assert tuple(sets[number] for number in range(len(order.sizes))) == order.quotas
    for quota, weight in zip(order.quotas, order.weights, strict=True):
        assert abs(quota - BLOCK * weight / sum(order.weights)) < 1
    assert sum(order.quotas) == BLOCK


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    st.integers(0, 200),
    st.integers(0, 60),
    st.integers(0, 99),
    st.booleans(),
)
def test_without_weights_it_is_the_order_of_all_rows_together(sizes, cursor, count, seed, shuffle):
    order = RowOrder(sizes=tuple(sizes), seed=seed, shuffle=shuffle)
    assert order.take(cursor, count) == rows_at(sum(sizes), cursor, count, seed, shuffle)


def test_the_order_of_one_set_stays_what_it_was():
    """So that a run that was begun with an earlier version goes on as it would have."""
    assert rows_at(10, 0, 12, seed=3) == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8, 4, 1]
    rows = [{"n": n} for n in range(10)]
    assert [row["n"] for row in split_rows(rows, validation=3, seed=3)[1]] == [0, 6, 9]


def test_an_even_mixture_without_shuffling_spreads_the_sets():
    order = RowOrder(sizes=(4, 4), weights=(3, 1), shuffle=False)
    assert order.take(0, 8) == [0, 1, 4, 2, 3, 0, 5, 1]
    assert RowOrder(sizes=(1, 1), weights=(1, 1), shuffle=False).take(0, 1000) == [0, 1] * 500


def test_the_sets_of_rows_are_counted_by_their_source():
    rows = [Row({"n": n}, source=source) for n, source in enumerate((0, 0, 2))]
    assert RowOrder.of(rows) == RowOrder(sizes=(2, 0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowOrder(sizes=(0,)), "sizes must hold at least one row"),
        (
            lambda: RowOrder(sizes=(1, 2), weights=(1.0,)),
            r"weights \(data\.weights\) must be as many as data sets, 2, got \(1\.0,\)",
        ),
        (
            lambda: RowOrder(sizes=(1, 2), weights=(1.0, 0.0)),
            r"must be positive.*leave set 2 out of data\.train",
        ),
        (
            lambda: RowOrder(sizes=(5, 0), weights=(1.0, 1.0)),
            r"set 2 has no rows left.*data\.too_long",
        ),
        (
            lambda: RowOrder(sizes=(5, 5), weights=(10_000.0, 1.0)),
            "must be at least 10.*raise the least",
        ),
        (
            lambda: split_rows([{}, {}], validation=0.1),
            r"data\.held_out\) must leave at least one of the 2 rows on each side",
        ),
    ],
)
def test_impossible_orders_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_split_rows_takes_a_share_or_a_number():
    rows = [{"n": n} for n in range(10)]
    assert [len(part) for part in split_rows(rows, validation=0.3)] == [7, 3]
    assert [len(part) for part in split_rows(rows, validation=3)] == [7, 3]
    assert [len(part) for part in split_rows(rows, validation=1.0)] == [9, 1], "a share is below 1"
    assert split_rows(rows, validation=3, seed=1) != split_rows(rows, validation=3, seed=2)

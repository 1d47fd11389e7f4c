"""Lengths in a few numbers, against plain counting."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemorl.data.packing import pack_plan
from nemorl.data.statistics import SAMPLE, Lengths, length_statistics


def of(tokens: list[int], limit: int = 300):
    return length_statistics(Lengths(tokens=tokens, limit=limit))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 50))
def test_numbers_are_those_of_plain_counting(tokens, room):
    limit = max(tokens) + room
    found = of(tokens, limit=limit)
    assert (found.count, found.total_tokens, found.max, found.limit) == (
        len(tokens),
        sum(tokens),
        max(tokens),
        limit,
    )
    assert found.mean == pytest.approx(sum(tokens) / len(tokens))
    assert sum(length <= found.p95 for length in tokens) >= 0.95 * len(tokens)
    assert sum(length < found.p95 for length in tokens) < 0.95 * len(tokens)
    assert found.padded_fill == pytest.approx(sum(tokens) / (len(tokens) * max(tokens)))
    assert found.packed_fill == pytest.approx(
        sum(tokens) / (len(pack_plan(tokens, max(tokens))) * max(tokens))
    )
    below, classes = 0, []
    for edge, _ in found.histogram:
        classes.append((edge, sum(below < length <= edge for length in tokens)))
        below = edge
    assert found.histogram == tuple(classes)
    assert sum(count for _, count in classes) == len(tokens)
    assert len(classes) <= 10


def test_what_the_limit_took():
    found = length_statistics(Lengths(tokens=[4, 8], limit=8, num_truncated=1, num_dropped=2))
    assert (found.num_truncated, found.num_dropped, found.num_over_limit) == (1, 2, 3)
    assert found.median == 6.0


def test_nothing_at_all():
    found = of([], limit=8)
    assert (found.count, found.mean, found.p95, found.max, found.packed_fill) == (0,) * 5
    assert found.histogram == ()


def test_the_packed_fill_of_many_sequences_is_estimated():
    few, many = [3, 5, 7, 9] * 100, [3, 5, 7, 9] * (SAMPLE // 2)
    assert of(many, limit=16).packed_fill == pytest.approx(of(few, limit=16).packed_fill, abs=0.25)
    assert of(many, limit=16).total_tokens == 6 * len(many)

"""Digests of rows notice every change."""

import datetime
from typing import Any

import numpy as np
import pytest

from nemorl.data.digest import difference, digests_of
from nemorl.data.rows import Row


def rows(count: int, source: int = 0, **changed: Any) -> list[Row]:
    values = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(count)]
    for place, value in changed.items():
        values[int(place[1:])]["answer"] = value
    return [Row(value, source=source) for value in values]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (rows(5), [{"answer": row["answer"], "prompt": row["prompt"]} for row in rows(5)], None),
        (rows(5), rows(5, _2=7), "'sums': other rows"),
        (rows(5), rows(7), "'sums': 7 rows instead of 5"),
        (rows(601), rows(599), "'sums': 599 rows instead of 601"),
        (rows(3) + rows(2, 1), rows(3) + rows(2, 1, _1=0), "'more': other rows"),
        (rows(3) + rows(2, 1), rows(3), "the number of data sets is 1 instead of 2"),
    ],
)
def test_a_difference_is_named(before: Any, after: Any, said: str | None):
    assert difference(digests_of(before), after, names=["'sums'", "'more'"]) == said
    assert (digests_of(before) == digests_of(after)) == (said is None)


def test_values_that_json_does_not_have_do_not_end_a_run():
    deep: list[Any] = []
    deep.append(deep)
    for value in (deep, {1: "a", "b": 2}, b"\xff", np.arange(3), datetime.date.today(), object()):
        strange = [{"value": value}, {"value": "another"}]
        assert difference(digests_of(strange), strange) is None
        assert difference(digests_of(strange), [strange[0], {"value": 3}]) is not None
    assert difference(digests_of([{"v": np.arange(3)}]), [{"v": np.arange(1, 4)}]) is not None
    assert difference(digests_of([{"v": object()}]), [{"v": object()}]) is None

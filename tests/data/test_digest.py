"""Digests of rows notice every change, and say where it is."""

import datetime
from typing import Any

import numpy as np
import pytest

from nemorl.data.digest import MOST_BLOCKS, difference, digests_of
from nemorl.data.rows import Row


def rows(count: int, source: int = 0, **changed: Any) -> list[Row]:
    values = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(count)]
    for place, value in changed.items():
        values[int(place[1:])]["answer"] = value
    return [
        Row(value, origin=f"sums.jsonl, line {n + 1}", source=source)
        for n, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (rows(5), [{"answer": row["answer"], "prompt": row["prompt"]} for row in rows(5)], None),
        (rows(5), rows(5, _2=7), "'sums': row 3 (sums.jsonl, line 3) differs"),
        (rows(5), rows(7), "'sums': 7 rows instead of 5; the first 5 are as they were"),
        (rows(5), rows(7, _0=0), "'sums': 7 rows instead of 5, and row 1 (sums.jsonl, "),
        (rows(600), rows(600, _599=0), "'sums': a row among 597 to 600 differs"),
        (rows(601), rows(599), "'sums': 599 rows instead of 601; the first 596 are as they "),
        (rows(3) + rows(2, 1), rows(3) + rows(2, 1, _1=0), "'more': row 2 (sums.jsonl, "),
        (rows(3) + rows(2, 1), rows(3), "the number of data sets is 1 instead of 2"),
    ],
)
def test_a_difference_is_named(before: Any, after: Any, said: str | None):
    found = difference(digests_of(before), after, names=["'sums'", "'more'"])
    assert found == said if said is None or found is None else found.startswith(said)
    assert (digests_of(before) == digests_of(after)) == (said is None)
    assert all(len(digest["digests"]) <= MOST_BLOCKS for digest in digests_of(before))


def test_values_that_json_does_not_have_do_not_end_a_run():
    deep: list[Any] = []
    deep.append(deep)
    for value in (deep, {1: "a", "b": 2}, b"\xff", np.arange(3), datetime.date.today(), object()):
        strange = [{"value": value}, {"value": "another"}]
        assert difference(digests_of(strange), strange) is None
        assert difference(digests_of(strange), [strange[0], {"value": 3}]) is not None
    assert difference(digests_of([{"v": np.arange(3)}]), [{"v": np.arange(1, 4)}]) is not None
    assert difference(digests_of([{"v": object()}]), [{"v": object()}]) is None

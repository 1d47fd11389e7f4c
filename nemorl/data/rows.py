"""Rows of a data set that know their place, so that errors can name it."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nemorl.data.stream import StreamedRows

Built = TypeVar("Built")
RowLike = TypeVar("RowLike", bound=Mapping[str, Any])

COLUMNS = ("prompt", "response", "answer", "messages", "chosen", "rejected", "label")
"""What the library reads; a source may have other names (`prompt_column`, ...)."""


class Row(dict[str, Any]):
    """The columns of a row: a dict that knows its place.

    >>> row = Row({"prompt": "1+1="}, origin="sums.jsonl, line 3")
    >>> row["prompt"], row.origin, row.source
    ('1+1=', 'sums.jsonl, line 3', 0)
    """

    origin: str
    """File and line, or the number of the row counted from 1."""
    source: int
    """Which of several data sets it belongs to, counted from 0."""

    def __init__(
        self,
        columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        *,
        origin: str = "",
        source: int = 0,
    ) -> None:
        super().__init__(columns)
        self.origin = origin
        self.source = source

    def but(self, **columns: Any) -> "Row":
        return Row({**self, **columns}, origin=self.origin, source=self.source)


def own_copy(value: Any) -> Any:
    """Return a deep copy of a row or column, which may be changed; itself where that can't be.

    >>> own_copy({"answers": ["2"]})
    {'answers': ['2']}
    """
    try:
        return copy.deepcopy(value)
    except Exception:  # each class has its own reason
        return value


def origin_of(row: Mapping[str, Any], index: int) -> str:
    """Return where a row came from; for a plain dict its place, counted from 1.

    >>> origin_of({"prompt": "a"}, 0)
    'row 1'
    """
    return getattr(row, "origin", "") or f"row {index + 1}"


def for_rows(rows: Iterable[RowLike], build: Callable[[RowLike], Built]) -> Sequence[Built]:
    """Return `build(row)` for each row, of a stream when it is asked for; a ValueError that it
    raises names the row.

    >>> for_rows([{"n": "x"}], lambda row: int(row["n"]))
    Traceback (most recent call last):
    ValueError: row 1: invalid literal for int() with base 10: 'x'
    """

    def named(row: RowLike, index: int = 0) -> Built:
        try:
            return build(row)
        except ValueError as error:
            raise ValueError(f"{origin_of(row, index)}: {error}") from error

    if isinstance(rows, StreamedRows):
        return rows.mapped(named)
    return [named(row, index) for index, row in enumerate(rows)]

"""Rows of a data set that know their place, so that errors can name it, and their seeded order."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, count, islice
from typing import Any, NoReturn, TypeVar

import numpy as np

FIRST = 1000
"""Rows of a stream that are checked before a run."""


class Places:
    """An endless run through the rows of `read(epoch)`, epoch after epoch, that `keep` accepts."""

    def __init__(self, read: Callable[[int], Iterable[Any]], keep: Any = None) -> None:
        self.read, self.keep = read, keep
        self._rows, self._row, self._place = iter(()), None, sys.maxsize

    @cached_property
    def first(self) -> list[Any]:
        return [*islice(filter(self.keep, self.read(0)), FIRST)]

    def __getitem__(self, place: int) -> Any:
        if place < self._place:
            self._rows = filter(self.keep, chain.from_iterable(map(self.read, count())))
            self._place = -1
        while self._place < place:
            following, self._place = self._place + 1, sys.maxsize  # stays so after an error
            self._row, self._place = next(self._rows), following
        return self._row


@dataclass(frozen=True)
class StreamedRows(Sequence[Any]):
    """Rows of a stream, or what is built of them, by place; also their `RowOrder`.

    What is at a place depends on the seed alone: a resumed run reads up to its own again.
    """

    places: Places
    build: Callable[[Any], Any] = lambda row: row

    num_rows = sys.maxsize
    """Unknown, so endless."""

    def take(self, cursor: int, count: int) -> list[int]:
        return [*range(cursor, cursor + count)]

    def mapped(self, build: Callable[[Any], Any]) -> Any:
        return replace(self, build=lambda row: build(self.build(row)))

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise ValueError("data.streaming is for sft, grpo, run.prompts and run.order: remove it")

    def __getitem__(self, place: Any) -> Any:
        return self.build(self.places[place])


def first_of(rows: Any) -> Any:
    """Return rows; of a stream the first 1,000.

    >>> first_of(StreamedRows(Places(lambda epoch: [1, 2]), str)), first_of([1])
    (['1', '2'], [1])
    """
    return [*map(rows.build, rows.places.first)] if isinstance(rows, StreamedRows) else rows


def shuffled(shards: Sequence[Any], epoch: int, *, seed: int, shuffle_buffer: int) -> Iterator[Any]:
    """Yield an epoch's rows; `datasets` shuffles shards and, in a buffer (0: neither), rows.

    >>> list(shuffled([lambda: [1, 2], lambda: [3]], 0, seed=0, shuffle_buffer=0))
    [1, 2, 3]
    """
    from datasets import IterableDataset

    data = IterableDataset.from_generator(
        lambda shards: ({"row": row} for shard in shards for row in shard()),
        gen_kwargs={"shards": [*shards]},
    )
    if shuffle_buffer:
        data = data.shuffle(seed=seed, buffer_size=shuffle_buffer)
        data.set_epoch(epoch)
    empty = True
    for example in data:
        empty = False
        yield example["row"]
    if empty:
        raise ValueError("data.train holds no rows: name another file or split")


Built = TypeVar("Built")
RowLike = TypeVar("RowLike", bound=Mapping[str, Any])

ENVIRONMENT = "environment"
"""The column that chooses a row's environment and reward, where they have names."""
COLUMNS = (
    *("prompt", "response", "answer", "messages", "chosen", "rejected", "margin", "label"),
    ENVIRONMENT,
)
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
        self.origin, self.source = origin, source

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


BLOCK = 1000
"""Places in which the shares of a mixture are exact."""


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """An endless run through one or several data sets, whose rows are numbered as if concatenated.

    Without weights, an epoch visits each row once, in an order of its own. With weights, each set
    has its share of every 1,000 places, exactly (rounded by largest remainder), and goes through
    its own rows epoch by epoch. What comes after a cursor (the places visited) depends on nothing
    else: a resumed run neither repeats nor drops a row. Raises: ValueError for impossible weights.

    >>> RowOrder(sizes=(4,), seed=0, shuffle=False).take(2, 4)
    [2, 3, 0, 1]
    >>> order = RowOrder(sizes=(100, 10), weights=(1, 3), seed=0)
    >>> sum(row >= 100 for row in order.take(0, 1000))
    750
    """

    sizes: tuple[int, ...]
    """Rows of each set."""
    weights: tuple[float, ...] = ()
    """Relative shares of the sets; none: each row once an epoch."""
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.num_rows:
            raise ValueError(f"sizes must hold at least one row, got {self.sizes}")
        if not self.weights:
            return
        if len(self.weights) != len(self.sizes):
            raise ValueError(
                f"weights (data.weights) must be as many as data sets, {len(self.sizes)}, got"
                f" {self.weights}: one for each of data.train"
            )
        for number, (size, weight) in enumerate(
            zip(self.sizes, self.weights, strict=True), start=1
        ):
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"weights (data.weights) must be positive, got {self.weights}: leave set"
                    f" {number} out of data.train"
                )
            if not size:
                raise ValueError(
                    f"set {number} has no rows left, but its weight is {weight}: leave it out, or"
                    " see data.too_long"
                )
        if 0 in self.quotas:
            least = sum(self.weights) / BLOCK
            raise ValueError(
                f"weights (data.weights) must be at least {least:g} here, a {BLOCK}th of their sum,"
                f" got {self.weights}: raise the least"
            )

    @classmethod
    def of(
        cls,
        rows: Sequence[Any],
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
        shuffle: bool = True,
    ) -> "RowOrder":
        """Return the order of rows that stand set after set (`Row.source`).

        >>> RowOrder.of([{"prompt": "a"}, {"prompt": "b"}]).sizes
        (2,)
        """
        sources = [getattr(row, "source", 0) for row in rows]
        if sources != sorted(sources):
            raise ValueError("the rows of several sets must stand set after set, as of load_rows")
        count = max(len(weights), max(sources, default=-1) + 1)
        return cls(
            sizes=tuple(sources.count(number) for number in range(count)),
            weights=tuple(weights),
            seed=seed,
            shuffle=shuffle,
        )

    @property
    def num_rows(self) -> int:
        """Rows of all sets together, and places of an epoch."""
        return sum(self.sizes)

    @property
    def quotas(self) -> tuple[int, ...]:
        """Each set's places in a block, where there are weights."""
        exact = [weight / sum(self.weights) * BLOCK for weight in self.weights]
        quotas = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
        for i in by_remainder[: BLOCK - sum(quotas)]:
            quotas[i] += 1
        return tuple(quotas)

    def take(self, cursor: int, count: int) -> list[int]:
        """Return the rows at places cursor, ..., cursor + count - 1."""
        if not self.weights:
            return self._visits(self.num_rows, cursor, count)
        rows: list[int] = []
        while len(rows) < count:
            block, place = divmod(cursor + len(rows), BLOCK)
            rows += self._in_block(block, place, min(BLOCK, place + count - len(rows)))
        return rows

    def _in_block(self, block: int, begin: int, end: int) -> list[int]:
        sets = _mixture(self.quotas, self.seed if self.shuffle else None, block)
        rows = np.empty(end - begin, dtype=np.int64)
        for number, (first, size, quota) in enumerate(
            zip(accumulate(self.sizes, initial=0), self.sizes, self.quotas, strict=False)
        ):
            mine = sets[begin:end] == number
            cursor = block * quota + int((sets[:begin] == number).sum())
            rows[mine] = self._visits(size, cursor, int(mine.sum()), number + 1)
            rows[mine] += first
        return rows.tolist()

    def _visits(self, size: int, cursor: int, count: int, stream: int = 0) -> list[int]:
        places = range(cursor, cursor + count)
        if not self.shuffle:
            return [place % size for place in places]
        return [
            int(_permutation(size, self.seed, place // size, stream)[place % size])
            for place in places
        ]


def split_rows(
    rows: Sequence[RowLike], *, validation: int | float, seed: int = 0
) -> tuple[list[RowLike], list[RowLike]]:
    """Return training and validation rows without overlap, both in their first order.

    `validation`: a number of rows, or a share if it is a float below 1.

    >>> train, held_out = split_rows([{"n": n} for n in range(5)], validation=0.4)
    >>> len(train), len(held_out)
    (3, 2)
    """
    share = isinstance(validation, float) and validation < 1
    count = round(validation * len(rows)) if share else validation
    if count != int(count) or not 0 < count < len(rows):
        raise ValueError(
            f"validation (data.held_out) must leave at least one of the {len(rows)} rows on each"
            f" side, got {validation} ({count} rows)"
        )
    held_out = set(RowOrder(sizes=(len(rows),), seed=seed).take(0, int(count)))
    sides: tuple[list[RowLike], list[RowLike]] = ([], [])
    for i, row in enumerate(rows):
        sides[i in held_out].append(row)
    return sides


@lru_cache(maxsize=64)
def _permutation(num_rows: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """stream: 0 is all rows as one set, n the set n of a mixture."""
    return np.random.default_rng((seed, epoch, stream) if stream else (seed, epoch)).permutation(
        num_rows
    )


@lru_cache(maxsize=8)
def _mixture(quotas: tuple[int, ...], seed: int | None, block: int) -> np.ndarray:
    sets = np.repeat(np.arange(len(quotas)), quotas)
    if seed is not None:
        return sets[_permutation(len(sets), seed, block, len(quotas) + 1)]
    due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    return sets[np.argsort(due, kind="stable")]

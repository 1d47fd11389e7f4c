"""The order in which training visits rows: seeded, a function of how many were visited."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nemorl.data.rows import RowLike

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
        if any(before > after for before, after in pairwise(sources)):
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
        by_remainder = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
        for i in by_remainder[: BLOCK - sum(quotas)]:
            quotas[i] += 1
        return tuple(quotas)

    def epoch(self, cursor: int) -> int:
        return cursor // self.num_rows

    def take(self, cursor: int, count: int) -> list[int]:
        """Return the rows at places cursor, ..., cursor + count - 1."""
        if not self.weights:
            return _visits(self.num_rows, cursor, count, self.seed, self.shuffle, 0)
        rows: list[int] = []
        while len(rows) < count:
            block, place = divmod(cursor + len(rows), BLOCK)
            rows += self._in_block(block, place, min(BLOCK, place + count - len(rows)))
        return rows

    def _in_block(self, block: int, begin: int, end: int) -> list[int]:
        sets = _mixture(self.quotas, self.seed if self.shuffle else None, block)
        rows = np.empty(end - begin, dtype=np.int64)
        for number, (first, size, quota) in enumerate(
            zip(accumulate((0, *self.sizes)), self.sizes, self.quotas, strict=False)
        ):
            mine = sets[begin:end] == number
            cursor = block * quota + int((sets[:begin] == number).sum())
            rows[mine] = [
                first + row
                for row in _visits(
                    size, cursor, int(mine.sum()), self.seed, self.shuffle, number + 1
                )
            ]
        return rows.tolist()


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


def _visits(
    num_rows: int, cursor: int, count: int, seed: int, shuffle: bool, stream: int
) -> list[int]:
    places = range(cursor, cursor + count)
    if not shuffle:
        return [place % num_rows for place in places]
    return [
        int(_permutation(num_rows, seed, place // num_rows, stream)[place % num_rows])
        for place in places
    ]


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

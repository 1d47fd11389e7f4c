"""How long the sequences of a data set are, and what a limit did to them."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices: the longest first, each into the row with the least room for it.

    >>> best_fit_decreasing([4, 8, 1, 4, 2, 1], 10)
    [[1, 2, 5], [0, 3, 4]]
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # room, when it arose (newest first), row; ascending
    least = min(filter(None, sizes), default=0)
    order = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    for turn, index in enumerate(order):
        size = sizes[index]
        if not size:
            break
        place = bisect_left(rooms, (size,))
        if place == len(rooms):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, _, row = rooms.pop(place)
        rows[row].append(index)
        if room - size >= least:
            insort(rooms, (room - size, -turn, row))
    return rows


SAMPLE = 20_000
"""Sequences whose packed fill is computed; of more it is estimated."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Token counts of a data set after the limit was applied."""

    tokens: Sequence[int]
    """Length of each sequence, and of each pair's longer side."""
    limit: int
    num_truncated: int = 0
    num_dropped: int = 0


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """A data set's lengths in tokens."""

    count: int
    """Sequences that are used."""
    total_tokens: int
    mean: float
    median: float
    p95: float
    """95 of 100 sequences are no longer."""
    max: int
    limit: int
    num_truncated: int
    num_dropped: int
    padded_fill: float
    """Share of a batch that is not padding, where every row is as long as the longest sequence."""
    packed_fill: float
    """The same with sequence packing into rows of that length."""
    num_over_limit: int
    """All that are or were longer."""
    histogram: tuple[tuple[int, int], ...]
    """Greatest length and number of sequences of up to ten classes of equal width."""


def length_statistics(lengths: Lengths) -> LengthStatistics:
    """Return the statistics of a data set's lengths.

    >>> found = length_statistics(Lengths(tokens=[2, 4, 4, 10], limit=16))
    >>> found.mean, found.max, found.padded_fill, found.packed_fill
    (5.0, 10, 0.5, 1.0)
    """
    tokens = np.asarray(lengths.tokens, dtype=np.int64)
    total, longest = int(tokens.sum()), int(tokens.max(initial=0))
    sample = tokens[:: max(1, -(-len(tokens) // SAMPLE))]
    rows = len(best_fit_decreasing(sample.tolist(), longest))
    width = max(1, -(-longest // 10))
    counts, edges = np.histogram(tokens - 1, np.arange(0, longest + width, width))
    return LengthStatistics(
        count=len(tokens),
        total_tokens=total,
        mean=total / max(1, len(tokens)),
        median=float(np.median(tokens)) if len(tokens) else 0.0,
        p95=float(np.quantile(tokens, 0.95, method="inverted_cdf")) if len(tokens) else 0.0,
        max=longest,
        limit=lengths.limit,
        num_truncated=lengths.num_truncated,
        num_dropped=lengths.num_dropped,
        padded_fill=total / (len(tokens) * longest) if total else 0.0,
        packed_fill=int(sample.sum()) / (rows * longest) if rows else 0.0,
        num_over_limit=int((tokens > lengths.limit).sum())
        + lengths.num_truncated
        + lengths.num_dropped,
        histogram=tuple(zip(edges[1:].tolist(), counts.tolist(), strict=True)),
    )

"""Which sequences share a row of limited length. Free of torch."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import groupby

import numpy as np


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices: the longest first, each into the row with the least room for it.

    >>> best_fit_decreasing([4, 8, 1, 4, 2, 1], 10)
    [[1, 2, 5], [0, 3, 4]]
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # the rooms that some row has, ascending
    rows_with: dict[int, list[int]] = {}
    order = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    for size, run in groupby(order, key=sizes.__getitem__):
        same, done = list(run) if size else [], 0
        while done < len(same):
            place = bisect_left(rooms, size)
            if place == len(rooms):
                room, row = capacity, len(rows)
                rows.append([])
            else:
                room = rooms[place]
                row = rows_with[room].pop()
                if not rows_with[room]:
                    del rows_with[room], rooms[place]
            # The tightest row remains it: it takes as many of this size as fit.
            moved = same[done : done + room // size]
            done += len(moved)
            rows[row] += moved
            room -= len(moved) * size
            if room not in rows_with:
                rows_with[room] = []
                insort(rooms, room)
            rows_with[room].append(row)
    return rows

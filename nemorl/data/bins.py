"""Bin packing of integer lengths: which sequences share a row.

Pure Python, deterministic, about n log n.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import numpy as np

Plan = tuple[tuple[int, ...], ...]
"""Per row (or rank, or microbatch) the indices of what it holds; each index is in exactly one."""
Algorithm = Literal[
    "best_fit_decreasing", "first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"
]
Bins = list[list[int]]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Longest first, each into the row with the least room that it fits into.

    >>> best_fit_decreasing([4, 8, 1, 4, 2, 1], 10)
    [[1, 2, 5], [0, 3, 4]]
    """
    bins: Bins = []
    by_room = _BySize()
    for size, run in _runs_decreasing(lengths):
        done = 0
        while done < len(run):
            room = by_room.smallest(at_least=size)
            if room is None:
                room, chosen = capacity, len(bins)
                bins.append([])
            else:
                chosen = by_room.pop(room)
            # What is left of the tightest row is tighter still, so it takes as many of this size as
            # fit.
            moved = run[done : done + room // size]
            done += len(moved)
            bins[chosen] += moved
            by_room.add(room - len(moved) * size, chosen)
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Longest first, each into the first row that it fits into.

    >>> first_fit_decreasing([4, 8, 1, 4, 2, 1], 10)
    [[1, 4], [0, 3, 2, 5]]
    """
    bins: Bins = []
    rooms = _FirstRoom(lengths, capacity)
    for size, run in _runs_decreasing(lengths):
        done = 0
        while done < len(run):
            chosen = rooms.first(at_least=size)
            if chosen == len(bins):
                bins.append([])
            moved = run[done : done + rooms.room(chosen) // size]
            done += len(moved)
            bins[chosen] += moved
            rooms.use(chosen, len(moved) * size)
    return bins


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Johnson and Garey (1985), "A 71/60 theorem for bin packing": large (> 1/2), medium (> 1/3),
    small (> 1/6) and tiny sequences in five phases.

    >>> modified_first_fit_decreasing([4, 8, 1, 4, 2, 1], 10)
    [[1, 4], [0, 3, 2, 5]]
    """
    large, medium, small, tiny = (_BySize() for _ in range(4))
    for index, size in enumerate(lengths):
        kind = (
            large
            if 2 * size > capacity
            else medium
            if 3 * size > capacity
            else small
            if 6 * size > capacity
            else tiny
        )
        kind.add(size, index)
    bins: Bins = []
    rooms: list[int] = []
    while large:  # 1. a row for each large one, longest first
        rooms.append(capacity - large.sizes[-1])
        bins.append([large.pop(large.sizes[-1])])

    def move(source: _BySize, size: int, chosen: int) -> None:
        bins[chosen].append(source.pop(size))
        rooms[chosen] -= size

    without_medium = []
    for chosen in range(len(bins)):  # 2. forwards: the largest medium one that fits
        fitting = medium.largest(at_most=rooms[chosen])
        if fitting is None:
            without_medium.append(chosen)
        else:
            move(medium, fitting, chosen)
    for chosen in reversed(
        without_medium
    ):  # 3. backwards, where there is no medium one: the smallest small one, and the largest that fits beside it
        if len(small) >= 2 and small.two_smallest() <= rooms[chosen]:
            move(small, small.sizes[0], chosen)
            move(small, small.largest(at_most=rooms[chosen]), chosen)  # type: ignore[arg-type]
    for chosen in range(len(bins)):  # 4. forwards: the largest of any kind while one fits
        for kind in (medium, small, tiny):
            while (fitting := kind.largest(at_most=rooms[chosen])) is not None:
                move(kind, fitting, chosen)
    rest = [
        index for kind in (medium, small, tiny) for index in kind
    ]  # 5. first fit decreasing into new rows
    return bins + [
        [rest[i] for i in row]
        for row in first_fit_decreasing([lengths[index] for index in rest], capacity)
    ]


def concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """In the given order: a row is filled until the next sequence doesn't fit.

    >>> concatenative([4, 8, 1, 4, 2, 1], 10)
    [[0], [1, 2], [3, 4, 5]]
    """
    bins: Bins = []
    room = -1
    for index, size in enumerate(lengths):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= size
    return bins


ALGORITHMS = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
    "concatenative": concatenative,
}


def _runs_decreasing(lengths: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
    """Equal lengths together, longest first; equal ones keep their order."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return ((size, list(run)) for size, run in groupby(order, key=lengths.__getitem__))


class _BySize:
    """A multiset of (size, member): the distinct sizes are kept sorted, members of one size leave
    in the order in which they came last.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.members: dict[int, list[int]] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return (member for size in reversed(self.sizes) for member in self.members[size])

    def add(self, size: int, member: int) -> None:
        if size not in self.members:
            self.members[size] = []
            insort(self.sizes, size)
        self.members[size].append(member)
        self.count += 1

    def pop(self, size: int) -> int:
        members = self.members[size]
        member = members.pop()
        self.count -= 1
        if not members:
            del self.members[size]
            del self.sizes[bisect_left(self.sizes, size)]
        return member

    def smallest(self, *, at_least: int) -> int | None:
        place = bisect_left(self.sizes, at_least)
        return self.sizes[place] if place < len(self.sizes) else None

    def largest(self, *, at_most: int) -> int | None:
        place = bisect_right(self.sizes, at_most)
        return self.sizes[place - 1] if place else None

    def two_smallest(self) -> int:
        """The sum of the two smallest sizes; there must be two members."""
        first = self.sizes[0]
        return first + (first if len(self.members[first]) > 1 else self.sizes[1])


class _FirstRoom:
    """A segment tree over the rows' room: the first row that fits a sequence in log n steps.

    Rows not opened yet have the whole capacity.
    """

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        # First fit leaves at most one row less than half full, so it never opens more rows than
        # this.
        rows = max(1, min(len(lengths), 2 * math.ceil(sum(lengths) / capacity) + 1))
        self.leaves = 1 << (rows - 1).bit_length()
        self.tree = [capacity] * (2 * self.leaves)

    def room(self, row: int) -> int:
        return self.tree[self.leaves + row]

    def first(self, *, at_least: int) -> int:
        node = 1
        while node < self.leaves:
            node *= 2
            if self.tree[node] < at_least:
                node += 1
        return node - self.leaves

    def use(self, row: int, amount: int) -> None:
        tree, node = self.tree, self.leaves + row
        tree[node] -= amount
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            most = left if left >= right else right
            if tree[node] == most:
                return
            tree[node] = most

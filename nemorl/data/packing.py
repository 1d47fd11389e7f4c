"""Packing of several sequences into one row, by a plan of which share it, and back."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from nemorl.checks import at_least
from nemorl.data.batch import TokenBatch, each_array
from nemorl.data.bins import best_fit_decreasing

Plan = tuple[tuple[int, ...], ...]
"""Per row (or rank, or microbatch) the indices of what it holds; each index is in exactly one."""
Lengths = Sequence[int] | Int[Tensor, "batch"] | Int[np.ndarray, "batch"]


def pack_plan(
    lengths: Lengths, capacity: int, *, num_rows_multiple: int = 1, units: Plan | None = None
) -> Plan:
    """Return which sequences share a row of `capacity` tokens: per row their indices, ascending.

    Best-fit decreasing, deterministic, n log n. The number of rows is a multiple of
    `num_rows_multiple` (the number of ranks): the fullest are split. Empty rows remain only if
    sequences are fewer than rows.
    `units`: sequences that share a row where they fit, such as one prompt's, unless there are
    fewer units than rows are needed.
    Raises: ValueError that names a sequence longer than the capacity.
    Source: NeMo RL `sequence_packing.algorithm`.

    >>> pack_plan([4, 8, 1, 4, 2, 1], 10)
    ((1, 2, 5), (0, 3, 4))
    >>> pack_plan([4, 8, 1, 4, 2, 1], 10, num_rows_multiple=3)
    ((1,), (0, 3, 4), (2, 5))
    """
    at_least(1, capacity=capacity, num_rows_multiple=num_rows_multiple)
    sizes = torch.as_tensor(lengths, dtype=torch.int64).tolist()
    if sizes and max(sizes) > capacity:
        raise ValueError(
            f"sequence {sizes.index(max(sizes))} has {max(sizes)} tokens, but a row holds"
            f" {capacity}: raise the capacity, or drop or truncate the sequence"
        )
    if units is not None and len(fitting := _fitting(units, sizes, capacity)) >= num_rows_multiple:
        totals = [sum(sizes[index] for index in unit) for unit in fitting]
        plan = pack_plan(totals, capacity, num_rows_multiple=num_rows_multiple)
        return rows_of(plan, fitting)
    rows = _with_multiple(best_fit_decreasing(sizes, capacity), sizes, num_rows_multiple)
    empty = [index for index, size in enumerate(sizes) if not size]
    if empty:  # sequences without a token go anywhere
        rows = rows or [[] for _ in range(num_rows_multiple)]
        rows[0] += empty
    return tuple(tuple(sorted(row)) for row in rows)


def _fitting(units: Plan, sizes: Sequence[int], capacity: int) -> Plan:
    """Cut units of more tokens than `capacity`."""
    found: list[list[int]] = []
    for unit in units:
        used = capacity + 1
        for index in unit:
            if used + sizes[index] > capacity:
                found.append([])
                used = 0
            found[-1].append(index)
            used += sizes[index]
    return tuple(map(tuple, found))


def rows_of(plan: Plan, units: Plan) -> Plan:
    """Return a plan of units as one of what they hold, ascending.

    >>> rows_of(((1,), (0, 2)), ((0, 3), (1,), (2,)))
    ((1,), (0, 2, 3))
    """
    return tuple(tuple(sorted(row for unit in part for row in units[unit])) for part in plan)


def pack(batch: TokenBatch, plan: Plan) -> TokenBatch:
    """Return a batch whose rows are a plan's: all arrays move, segments count on, 1, 2, ...

    An index of the plan is a row of `batch` with all its segments, which stay together, in order.
    Raises: ValueError where the plan lacks or repeats a row.

    >>> from nemorl.data.batch import collate
    >>> ids = [5, 6, 7], [8], [9, 9]
    >>> masks = [{"loss_mask": [False] * len(x), "response_mask": [False] * len(x)} for x in ids]
    >>> batch = collate([{"input_ids": x, **mask} for x, mask in zip(ids, masks)])
    >>> packed = pack(batch, ((0, 1), (2,)))
    >>> packed.input_ids.tolist(), packed.segment_ids.tolist()
    ([[5, 6, 7, 8], [9, 9, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]])
    """
    lengths = batch.lengths.cpu().numpy()
    layout = _layout(plan, lengths)
    width = int(layout.used.max(initial=0))
    real = batch.segment_ids > 0
    source = real.flatten().nonzero().flatten()
    target = layout.targets(lengths, width).to(source.device)
    before = torch.from_numpy(layout.before(num_segments(batch.segment_ids).cpu().numpy())).to(
        real.device
    )
    numbered = replace(batch, segment_ids=torch.where(real, batch.segment_ids + before[:, None], 0))
    shape = (len(plan), width)
    return each_array(
        numbered, lambda values, free: _move(values, source, target, shape, free=free)
    )


def segments_apart(batch: TokenBatch) -> tuple[TokenBatch, Plan]:
    """Return a batch with a row for each segment, and the plan by which `pack` undoes it.

    >>> from nemorl.data.batch import collate
    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> batch = collate([{"input_ids": [n], **masks} for n in (5, 6, 7)])
    >>> segments_apart(pack(batch, ((0, 1), (2,))))[1]
    ((0, 1), (2,))
    """
    counts, real = num_segments(batch.segment_ids), batch.segment_ids > 0
    first = counts.cumsum(0) - counts
    plan = tuple(
        tuple(range(begin, begin + count))
        for begin, count in zip(first.tolist(), counts.tolist(), strict=True)
    )
    columns = batch.position_ids[real]  # they begin again with each segment
    shape = (int(counts.sum()), int(columns.max()) + 1 if len(columns) else 0)
    target = (first[:, None] + batch.segment_ids - 1)[real] * shape[1] + columns
    source = real.flatten().nonzero().flatten()
    ones = replace(batch, segment_ids=real.long())
    return each_array(ones, lambda x, free: _move(x, source, target, shape, free=free)), plan


def num_segments(segment_ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch"]:
    """Return each row's number of segments: the greatest id in it.

    >>> num_segments(torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0]])).tolist()
    [2, 0]
    """
    return segment_ids.amax(-1) if segment_ids.shape[1] else segment_ids.sum(-1)


def unpack(
    values: Shaped[Tensor, "rows cap *rest"],
    plan: Plan,
    lengths: Lengths,
    *,
    length: int | None = None,
) -> Shaped[Tensor, "batch seq *rest"]:
    """Return one array of the rows that were packed, in their order: the inverse of `pack`.

    Args:
        values: [rows, columns, ...], such as logprobs of packed rows.
        plan, lengths: the plan and the lengths that it was made of.
        length: columns of the result, padded on the right. Default: the longest row.

    >>> unpack(torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0]]), ((0, 1), (2,)), [3, 1, 2]).tolist()
    [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    """
    sizes = torch.as_tensor(lengths, dtype=torch.int64).cpu().numpy()
    layout = _layout(plan, sizes)
    rows, width = values.shape[:2]
    if rows != len(plan) or width < layout.used.max(initial=0):
        raise ValueError(
            f"values must have the plan's {len(plan)} rows of at least {layout.used.max(initial=0)}"
            f" columns, got {rows} rows of {width}"
        )
    longest = int(sizes.max(initial=0))
    if length is not None and length < longest:
        raise ValueError(f"length must hold the longest row ({longest} tokens), got {length}")
    length = longest if length is None else length
    source = layout.targets(sizes, width).to(values.device)
    target = _within(sizes, np.arange(len(sizes)) * length).to(values.device)
    return _move(values, source, target, (len(sizes), length))


class _Layout(NamedTuple):
    """Indices in a plan's order with their rows, and per index its row and first column."""

    order: np.ndarray
    row_of: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    used: np.ndarray
    """Per row, the tokens in it."""

    def targets(self, lengths: np.ndarray, width: int) -> Tensor:
        return _within(lengths, self.rows * width + self.starts)

    def before(self, sizes: np.ndarray) -> np.ndarray:
        return _before(self.order, self.row_of, sizes)


def _layout(plan: Plan, lengths: np.ndarray) -> _Layout:
    order = np.fromiter((index for row in plan for index in row), dtype=np.int64)
    counts = np.asarray([len(row) for row in plan], dtype=np.int64)
    times = np.bincount(order[(order >= 0) & (order < len(lengths))], minlength=len(lengths))
    if len(order) != len(lengths) or (times != 1).any():
        wrong = [f"sequence {i} {count} times" for i, count in enumerate(times) if count != 1]
        raise ValueError(
            f"the plan must hold each of the {len(lengths)} sequences once, but it has"
            f" {(wrong or [f'{len(order)} entries'])[0]}: make it from this batch's lengths"
        )
    row_of = np.repeat(np.arange(len(plan)), counts)
    rows = np.empty_like(lengths)
    rows[order] = row_of
    used = np.bincount(row_of, weights=lengths[order], minlength=len(plan)).astype(np.int64)
    return _Layout(order, row_of, rows, _before(order, row_of, lengths), used)


def _before(order: np.ndarray, row_of: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    in_order = sizes[order]
    totals = np.bincount(row_of, weights=in_order).astype(np.int64)
    before = np.empty_like(sizes)
    before[order] = np.cumsum(in_order) - in_order - (np.cumsum(totals) - totals)[row_of]
    return before


def _within(lengths: np.ndarray, starts: np.ndarray) -> Tensor:
    """Return `starts[i], starts[i] + 1, ...`, `lengths[i]` places for each i."""
    before = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.repeat(starts - before, lengths) + np.arange(lengths.sum()))


def _move(
    values: Tensor, source: Tensor, target: Tensor, shape: tuple[int, int], *, free: int = 0
) -> Tensor:
    moved = values.new_full((shape[0] * shape[1], *values.shape[2:]), free)
    return moved.index_copy(0, target, values.flatten(0, 1)[source]).unflatten(0, shape)


def _with_multiple(rows: list[list[int]], sizes: Sequence[int], multiple: int) -> list[list[int]]:
    """Split the fullest rows in two until the number of rows is a multiple, then add empty ones."""
    rows = list(rows)
    splittable = [
        (-sum(sizes[index] for index in row), number)
        for number, row in enumerate(rows)
        if len(row) > 1
    ]
    heapify(splittable)
    for _ in range(-len(rows) % multiple):
        rows.append([])
        if splittable:
            number = heappop(splittable)[1]
            for place, half in zip(
                (number, len(rows) - 1), _halves(rows[number], sizes), strict=True
            ):
                rows[place] = half
                if len(half) > 1:
                    heappush(splittable, (-sum(sizes[index] for index in half), place))
    return rows


def _halves(row: list[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    used = [0, 0]
    for index in sorted(row, key=lambda index: -sizes[index]):
        lighter = int(used[1] < used[0])
        halves[lighter].append(index)
        used[lighter] += sizes[index]
    return halves

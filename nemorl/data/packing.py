"""Packing of several sequences into one row by a plan, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from nemorl.checks import at_least
from nemorl.data.batch import TokenBatch, each_array, extents, require_room, take, trim
from nemorl.data.statistics import best_fit_decreasing

Plan = tuple[tuple[int, ...], ...]
"""Per row (or rank, or microbatch) the indices of what it holds; each index is in exactly one."""
Lengths = Sequence[int] | Int[Tensor, "batch"] | Int[np.ndarray, "batch"]


def pack_plan(
    lengths: Lengths, capacity: int, *, num_rows_multiple: int = 1, units: Plan | None = None
) -> Plan:
    """Return which sequences share a row of `capacity` tokens: per row their indices, ascending.

    Best-fit decreasing, deterministic. The number of rows is a multiple of
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
    require_room("capacity", capacity, sizes)
    if units is not None and len(fitting := _fitting(units, sizes, capacity)) >= num_rows_multiple:
        totals = [sum(sizes[index] for index in unit) for unit in fitting]
        return rows_of(pack_plan(totals, capacity, num_rows_multiple=num_rows_multiple), fitting)
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
    return tuple(tuple(sorted(chain(*(units[unit] for unit in part)))) for part in plan)


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
    counts = num_segments(batch.segment_ids).cpu().numpy()
    before = torch.from_numpy(_layout(plan, counts).starts).to(real.device)
    numbered = replace(batch, segment_ids=torch.where(real, batch.segment_ids + before[:, None], 0))
    return each_array(
        numbered, lambda x, free: _move(x, source, target, (len(plan), width), free=free)
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
    places = iter(range(int(counts.sum())))
    plan = tuple(tuple(islice(places, count)) for count in counts.tolist())
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
    length = int(sizes.max(initial=0)) if length is None else length
    require_room("length", length, sizes.tolist())
    source = layout.targets(sizes, width).to(values.device)
    target = _within(sizes, np.arange(len(sizes)) * length).to(values.device)
    return _move(values, source, target, (len(sizes), length))


class _Layout(NamedTuple):
    """Each index's row and first column, and each row's tokens."""

    rows: np.ndarray
    starts: np.ndarray
    used: np.ndarray

    def targets(self, lengths: np.ndarray, width: int) -> Tensor:
        return _within(lengths, self.rows * width + self.starts)


def _layout(plan: Plan, lengths: np.ndarray) -> _Layout:
    order = np.fromiter(chain(*plan), dtype=np.int64)
    counts = np.asarray([len(row) for row in plan], dtype=np.int64)
    times = np.bincount(order[(order >= 0) & (order < len(lengths))], minlength=len(lengths))
    if len(order) != len(lengths) or (times != 1).any():
        wrong = [f"sequence {i} {count} times" for i, count in enumerate(times) if count != 1]
        raise ValueError(
            f"the plan must hold each of the {len(lengths)} sequences once, but it has"
            f" {(wrong or [f'{len(order)} entries'])[0]}: make it from this batch's lengths"
        )
    row_of = np.repeat(np.arange(len(plan)), counts)
    in_order = lengths[order]
    used = np.bincount(row_of, weights=in_order, minlength=len(plan)).astype(np.int64)
    rows, starts = np.empty_like(lengths), np.empty_like(lengths)
    rows[order] = row_of
    starts[order] = np.cumsum(in_order) - in_order - (np.cumsum(used) - used)[row_of]
    return _Layout(rows, starts, used)


def _within(lengths: np.ndarray, starts: np.ndarray) -> Tensor:
    """Return `starts[i], starts[i] + 1, ...`, `lengths[i]` places for each i."""
    before = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.repeat(starts - before, lengths) + np.arange(lengths.sum()))


def _move(
    values: Tensor, source: Tensor, target: Tensor, shape: tuple[int, int], *, free: float = 0
) -> Tensor:
    moved = values.new_full((shape[0] * shape[1], *values.shape[2:]), free)
    return moved.index_copy(0, target, values.flatten(0, 1)[source]).unflatten(0, shape)


def _with_multiple(rows: list[list[int]], sizes: Sequence[int], multiple: int) -> list[list[int]]:
    for _ in range(-len(rows) % multiple):
        several = [number for number, row in enumerate(rows) if len(row) > 1]
        rows.append([])
        if several:
            fullest = max(several, key=lambda number: sum(sizes[index] for index in rows[number]))
            rows[fullest], rows[-1] = _halves(rows[fullest], sizes)
    return rows


def _halves(row: list[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    used = [0, 0]
    for index in sorted(row, key=lambda index: -sizes[index]):
        lighter = int(used[1] < used[0])
        halves[lighter].append(index)
        used[lighter] += sizes[index]
    return halves


QUADRATIC = 1 / (12 * 2048)
"""Cost of a pair of tokens relative to a token's matrix products, at a width of 2048."""


def row_costs(batch: TokenBatch) -> tuple[float, ...]:
    """Return what each row costs to train on: Σ over its segments of L + QUADRATIC·L².

    >>> from nemorl.data.batch import collate
    >>> masks = {"loss_mask": [False] * 96, "response_mask": [False] * 96}
    >>> row_costs(collate([{"input_ids": [1] * 96, **masks}]))
    (96.375,)
    """
    segments = batch.segment_ids.cpu()
    if not segments.numel():
        return (0.0,) * len(batch)
    counts = torch.zeros(len(batch), int(segments.max()) + 1, dtype=torch.float64)
    counts.scatter_add_(1, segments.long(), torch.ones_like(segments, dtype=torch.float64))
    lengths = counts[:, 1:]
    return tuple((lengths + QUADRATIC * lengths.square()).sum(-1).tolist())


def shard_by_rank(batch: TokenBatch, num_ranks: int, *, units: Plan | None = None) -> Plan:
    """Return which rows go to which rank: as equal as possible in cost, and in number up to one.

    Deterministic. `split` applies the plan, `merge` undoes it. With fewer rows than ranks some
    ranks get none: `pack_plan(..., num_rows_multiple=num_ranks)` avoids it.

    units: rows that stay together, such as one prompt's, unless there are fewer units than ranks.

    >>> from nemorl.data.batch import collate
    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> shard_by_rank(collate([{"input_ids": [1], **masks}] * 3), 2)
    ((0, 2), (1,))
    """
    costs = row_costs(batch)
    if units is None or len(units) < num_ranks:
        return balance(costs, num_ranks)
    dealt = balance([sum(costs[row] for row in unit) for unit in units], num_ranks)
    return rows_of(dealt, units)


def balance(costs: Sequence[float], num_parts: int) -> Plan:
    """Return indices in `num_parts` parts of similar total cost, whose sizes differ by one at most.

    >>> balance([9, 1, 8, 2], 2)
    ((0, 1), (2, 3))
    """
    at_least(1, num_parts=num_parts)
    size, larger = divmod(len(costs), num_parts)  # so many parts may hold one more
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    cheapest = [(0.0, number) for number in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        total, number = heappop(cheapest)
        while len(parts[number]) >= size + (larger > 0):
            total, number = heappop(cheapest)
        parts[number].append(index)
        larger -= len(parts[number]) > size
        heappush(cheapest, (total + costs[index], number))
    return tuple(tuple(sorted(part)) for part in parts)


def split_microbatches(
    batch: TokenBatch,
    *,
    rows: int | None = None,
    token_budget: int | None = None,
    min_microbatches: int = 1,
    units: Plan | None = None,
) -> Plan:
    """Return which rows go through the model together.

    Args:
        rows: so many at a time, in the given order; or
        token_budget: as many as it allows. It counts padded tokens, rows · longest row, so rows of
            similar length meet.
        min_microbatches: the largest number among ranks that must do equally many passes:
            microbatches with most rows are halved, then empty ones added.
        units: rows that stay together where `token_budget` allows it, such as one prompt's.
    Raises: ValueError that names a row longer than the budget, and unless one of `rows` and
    `token_budget` is given.

    >>> from nemorl.data.batch import collate
    >>> masks = {"loss_mask": [False] * 5, "response_mask": [False] * 5}
    >>> batch = collate([{"input_ids": [1] * 5, **masks}] * 3)
    >>> split_microbatches(batch, rows=2), split_microbatches(batch, token_budget=11)
    (((0, 1), (2,)), ((0, 1), (2,)))
    """
    if rows is not None and token_budget is None:
        at_least(1, rows=rows)
        everything = tuple(range(len(batch)))
        plan = [everything[start : start + rows] for start in range(0, len(batch), rows)]
    elif token_budget is not None and rows is None:
        lengths = extents(batch).tolist()
        require_room("token_budget", token_budget, lengths, "row")
        units = tuple((row,) for row in range(len(batch))) if units is None else units
        plan = list(_by_padded_tokens(lengths, token_budget, units))
    else:
        raise ValueError(f"give one of rows ({rows}) and token_budget ({token_budget})")
    return _halved(plan, min_microbatches)


def _halved(plan: list[tuple[int, ...]], count: int) -> Plan:
    while len(plan) < count:
        most = max(range(len(plan)), key=lambda number: len(plan[number]), default=None)
        if most is None or len(plan[most]) < 2:
            return (*plan, *((),) * (count - len(plan)))
        middle = len(plan[most]) // 2
        plan[most : most + 1] = plan[most][:middle], plan[most][middle:]
    return tuple(plan)


def _by_padded_tokens(
    lengths: Sequence[int], budget: int, units: Plan
) -> Iterable[tuple[int, ...]]:
    part: list[int] = []
    longest = 0
    for unit in sorted(units, key=lambda unit: -max(lengths[row] for row in unit)):
        widest = max(lengths[row] for row in unit)
        whole = len(unit) * widest <= budget
        for row in unit:
            more, width = (len(unit), widest) if whole and row == unit[0] else (1, lengths[row])
            if part and (len(part) + more) * max(longest, width) > budget:
                yield tuple(sorted(part))
                part, longest = [], 0
            part.append(row)
            longest = max(longest, lengths[row])
    if part:
        yield tuple(sorted(part))


def split(batch: TokenBatch, plan: Plan, *, multiple_of: int = 1) -> tuple[TokenBatch, ...]:
    """Return the parts of a plan, each as wide as its longest row, rounded up to `multiple_of`.

    >>> from nemorl.data.batch import collate
    >>> masks = {"loss_mask": [False], "response_mask": [False]}
    >>> batch = collate([{"input_ids": [n], **masks} for n in (3, 4)], length=5)
    >>> [part.input_ids.tolist() for part in split(batch, ((0,), (1,)))]
    [[[3]], [[4]]]
    """
    return tuple(trim(take(batch, rows), multiple_of=multiple_of) for rows in plan)


def merge(parts: Sequence[Shaped[Tensor, "..."]], plan: Plan) -> Shaped[Tensor, "..."]:
    """Return one array of all rows in their first order: the inverse of `split`.

    `parts` are `[rows]`, `[rows, seq]` or `[rows, seq, ...]`; narrow ones are padded with 0 on the
    right. Raises: ValueError unless parts and plan have the same rows.

    >>> merge([torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [2.0]])], ((1,), (2, 0))).tolist()
    [[2.0, 0.0], [3.0, 3.0], [1.0, 0.0]]
    """
    found, wanted = [len(part) for part in parts], [len(rows) for rows in plan]
    order = [*chain(*plan)]
    if found != wanted or sorted(order) != list(range(len(order))):
        raise ValueError(
            f"parts must have the plan's rows, each once: they have {found}, the plan is {plan}"
        )
    inverse = sorted(range(len(order)), key=order.__getitem__)
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        parts = [
            pad_tensor(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1]))
            for part in parts
        ]
    return torch.cat(list(parts))[inverse]

"""Several sequences in one row, and back.

A plan says which; `pack` and `unpack` move every per-token array by one gather.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from nemorl.data.batch import TokenBatch
from nemorl.data.bins import ALGORITHMS, Algorithm, Plan
from nemorl.data.padding import require_multiple, round_up

Lengths = Sequence[int] | Int[Tensor, "batch"] | Int[np.ndarray, "batch"]


def pack_plan(
    lengths: Lengths,
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    num_rows_multiple: int = 1,
) -> Plan:
    """Which sequences share a row of `capacity` tokens: per row the indices of its sequences,
    ascending; each index is in exactly one row.

    `num_rows_multiple` (say, the number of ranks) brings the number of rows up to a multiple by
    splitting the fullest rows; only where there are fewer sequences than rows do empty rows remain.
    Deterministic. Costs n log n; 100,000 log-normal lengths take a fraction of a second.

    Raises ValueError that names a sequence longer than the capacity.

    Source: NeMo RL `sequence_packing.algorithm` (the same four), MFFD after Johnson & Garey (1985).

    >>> pack_plan([4, 8, 1, 4, 2, 1], 10)
    ((1, 2, 5), (0, 3, 4))
    >>> pack_plan([4, 8, 1, 4, 2, 1], 10, num_rows_multiple=3)
    ((1,), (0, 3, 4), (2, 5))
    """
    sizes = _plain(lengths)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if capacity < 1 or num_rows_multiple < 1:
        raise ValueError(
            f"capacity and num_rows_multiple must be at least 1, got {capacity} and"
            f" {num_rows_multiple}"
        )
    if sizes and not 0 <= min(sizes) <= max(sizes) <= capacity:
        index = next(index for index, size in enumerate(sizes) if not 0 <= size <= capacity)
        raise ValueError(
            f"sequence {index} has {sizes[index]} tokens, but a row holds {capacity}: raise the"
            " capacity, or drop or truncate the sequence"
        )
    filled = [index for index, size in enumerate(sizes) if size]
    bins = ALGORITHMS[algorithm]([sizes[index] for index in filled], capacity)
    rows = _with_multiple(
        [[filled[place] for place in row] for row in bins], sizes, num_rows_multiple
    )
    if len(filled) < len(sizes):  # sequences without a token go anywhere
        rows = rows or [[] for _ in range(num_rows_multiple)]
        rows[0] += [index for index, size in enumerate(sizes) if not size]
    return tuple(tuple(sorted(row)) for row in rows)


def pack(
    batch: TokenBatch, plan: Plan, *, capacity: int | None = None, multiple_of: int = 1
) -> TokenBatch:
    """The rows of a batch in the rows of a plan: all arrays move along, and in each row the
    segments count on, 1, 2, ...

    What a plan's indices name is a row of the batch with all its segments: those (say, the two
    answers of a preference pair) stay together, in order. A row has `capacity` columns (a multiple
    of `multiple_of`), or as many as the fullest row needs, rounded up to `multiple_of`. Free places
    hold 0. Raises ValueError where the plan doesn't hold each row of the batch once, or a row
    exceeds the capacity.

    >>> from nemorl.data.batch import collate
    >>> ids = [5, 6, 7], [8], [9, 9]
    >>> batch = collate([{"input_ids": x, "loss_mask": [False] * len(x), "response_mask": [False] * len(x)} for x in ids])
    >>> packed = pack(batch, ((0, 1), (2,)))
    >>> packed.input_ids.tolist(), packed.segment_ids.tolist(), packed.position_ids.tolist()
    ([[5, 6, 7, 8], [9, 9, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 0]])
    >>> pack(packed, ((1, 0),)).segment_ids.tolist()
    [[1, 1, 2, 2, 2, 3]]
    """
    require_multiple(multiple_of)
    lengths = batch.lengths.cpu().numpy()
    layout = _layout(plan, lengths)
    width = _width(layout.used, capacity, multiple_of)
    real = batch.segment_ids > 0
    source = real.flatten().nonzero().flatten()
    target = layout.targets(lengths, width).to(source.device)
    before = torch.from_numpy(layout.before(num_segments(batch.segment_ids).cpu().numpy())).to(
        real.device
    )
    numbered = replace(batch, segment_ids=torch.where(real, batch.segment_ids + before[:, None], 0))
    return pytree.tree_map_only(
        Tensor, lambda values: _move(values, source, target, (len(plan), width)), numbered
    )


def num_segments(segment_ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch"]:
    """How many segments each row has: the greatest number in it.

    >>> num_segments(torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0]])).tolist()
    [2, 0]
    """
    return segment_ids.amax(-1) if segment_ids.shape[1] else segment_ids.sum(-1)


@overload
def unpack(
    values: TokenBatch, plan: Plan, lengths: Lengths, *, length: int | None = None
) -> TokenBatch: ...


@overload
def unpack(
    values: Tensor, plan: Plan, lengths: Lengths, *, length: int | None = None
) -> Tensor: ...


def unpack(
    values: TokenBatch | Shaped[Tensor, "rows cap *rest"],
    plan: Plan,
    lengths: Lengths,
    *,
    length: int | None = None,
) -> TokenBatch | Shaped[Tensor, "batch seq *rest"]:
    """The inverse of `pack`, for a whole batch or for one array (say, logprobs that were computed
    on the packed rows): the rows that were packed, in their order, padded on the right to `length`
    columns (default: the longest row). `lengths` are those that the plan was made of. In a batch
    each row's segments count from 1 again; an array is moved as it is.

    >>> unpack(torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0]]), ((0, 1), (2,)), [3, 1, 2]).tolist()
    [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    """
    sizes = np.asarray(_plain(lengths), dtype=np.int64)
    layout = _layout(plan, sizes)
    if isinstance(values, TokenBatch):
        moved = pytree.tree_map_only(
            Tensor, lambda array: unpack(array, plan, lengths, length=length), values
        )
        real = moved.segment_ids > 0
        first = (
            moved.segment_ids.masked_fill(~real, torch.iinfo(torch.int64).max).amin(
                -1, keepdim=True
            )
            if real.shape[1]
            else moved.segment_ids
        )
        return replace(moved, segment_ids=torch.where(real, moved.segment_ids - first + 1, 0))
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
    """Where the sequences of a plan stand: their indices in the plan's order with the row of each,
    and per index its row and its first column.
    """

    order: np.ndarray
    row_of: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    used: np.ndarray
    """Per row, the tokens in it."""

    def targets(self, lengths: np.ndarray, width: int) -> Tensor:
        """Per token, sequence by sequence, its place in the flattened rows of `width` columns."""
        return _within(lengths, self.rows * width + self.starts)

    def before(self, sizes: np.ndarray) -> np.ndarray:
        """Per index, the total size of those that stand before it in its row."""
        return _before(self.order, self.row_of, sizes)


def _layout(plan: Plan, lengths: np.ndarray) -> _Layout:
    order = np.fromiter((index for row in plan for index in row), dtype=np.int64)
    counts = np.asarray([len(row) for row in plan], dtype=np.int64)
    times = np.bincount(order[(order >= 0) & (order < len(lengths))], minlength=len(lengths))
    if len(order) != len(lengths) or (times != 1).any():
        wrong = (
            f"sequence {int((times != 1).argmax())} is there {int(times[(times != 1).argmax()])}"
            " times"
            if (times != 1).any()
            else f"it holds {len(order)}"
        )
        raise ValueError(
            f"the plan must hold each of the {len(lengths)} sequences once, {wrong}: make it from"
            " this batch's lengths"
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
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` places for each i, one after the other."""
    before = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.repeat(starts - before, lengths) + np.arange(lengths.sum()))


def _move(values: Tensor, source: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    moved = values.new_zeros((shape[0] * shape[1], *values.shape[2:]))
    return moved.index_copy(0, target, values.flatten(0, 1)[source]).unflatten(0, shape)


def _width(used: np.ndarray, capacity: int | None, multiple_of: int) -> int:
    fullest = int(used.max(initial=0))
    if capacity is None:
        return round_up(fullest, multiple_of)
    if capacity < fullest:
        raise ValueError(
            f"capacity must hold the fullest row: row {int(used.argmax())} of the plan has"
            f" {fullest} tokens, capacity is {capacity}"
        )
    if capacity % multiple_of:
        raise ValueError(
            f"capacity must be a multiple of multiple_of ({multiple_of}), got {capacity}: try"
            f" {round_up(capacity, multiple_of)}"
        )
    return capacity


def _with_multiple(rows: list[list[int]], sizes: Sequence[int], multiple: int) -> list[list[int]]:
    """Split the fullest rows in two until the number of rows is a multiple; empty rows only when
    nothing is left to split.
    """
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


def _plain(lengths: Lengths) -> list[int]:
    return (
        lengths.tolist()
        if isinstance(lengths, Tensor | np.ndarray)
        else [int(length) for length in lengths]
    )

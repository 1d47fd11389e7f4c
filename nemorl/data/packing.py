"""Several sequences in one row, and back (SPEC §11). A plan says which; `pack` and `unpack` move every per-token array by one gather."""

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


def pack_plan(lengths: Lengths, capacity: int, *, algorithm: Algorithm = "best_fit_decreasing", num_rows_multiple: int = 1) -> Plan:
    """Which sequences share a row of `capacity` tokens: per row the indices of its sequences, ascending; each index is in exactly one row.

    `num_rows_multiple` (say, the number of ranks) brings the number of rows up to a multiple by splitting the fullest rows; only where
    there are fewer sequences than rows do empty rows remain. Deterministic. Costs n log n; 100,000 log-normal lengths take a fraction of a second.

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
        raise ValueError(f"capacity and num_rows_multiple must be at least 1, got {capacity} and {num_rows_multiple}")
    if sizes and not 0 <= min(sizes) <= max(sizes) <= capacity:
        index = next(index for index, size in enumerate(sizes) if not 0 <= size <= capacity)
        raise ValueError(
            f"sequence {index} has {sizes[index]} tokens, but a row holds {capacity}: raise the capacity, or drop or truncate the sequence"
        )
    filled = [index for index, size in enumerate(sizes) if size]
    bins = ALGORITHMS[algorithm]([sizes[index] for index in filled], capacity)
    rows = _with_multiple([[filled[place] for place in row] for row in bins], sizes, num_rows_multiple)
    if len(filled) < len(sizes):  # sequences without a token go anywhere
        rows = rows or [[] for _ in range(num_rows_multiple)]
        rows[0] += [index for index, size in enumerate(sizes) if not size]
    return tuple(tuple(sorted(row)) for row in rows)


def pack(batch: TokenBatch, plan: Plan, *, capacity: int | None = None, multiple_of: int = 1) -> TokenBatch:
    """The sequences of a batch (one per row) in the rows of a plan: all arrays move along, positions restart, segments count 1, 2, ... in each row.

    A row has `capacity` columns (a multiple of `multiple_of`), or as many as the fullest row needs, rounded up to `multiple_of`. Free places hold 0.
    Raises ValueError where a row of the batch holds several segments already, the plan doesn't hold each row once, or a row exceeds the capacity.

    >>> from nemorl.data.batch import collate
    >>> ids = [5, 6, 7], [8], [9, 9]
    >>> batch = collate([{"input_ids": x, "loss_mask": [False] * len(x), "response_mask": [False] * len(x)} for x in ids])
    >>> packed = pack(batch, ((0, 1), (2,)))
    >>> packed.input_ids.tolist(), packed.segment_ids.tolist(), packed.position_ids.tolist()
    ([[5, 6, 7, 8], [9, 9, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 0]])
    """
    require_multiple(multiple_of)
    several = (batch.segment_ids > 1).any(-1).nonzero().flatten().tolist()
    if several:
        found = int(batch.segment_ids[several[0]].max())
        raise ValueError(f"each row of the batch must hold one sequence, row {several[0]} holds {found}: unpack the batch first")
    lengths = batch.lengths.cpu().numpy()
    layout = _layout(plan, lengths)
    width = _width(layout.used, capacity, multiple_of)
    real = batch.segment_ids > 0
    source = real.flatten().nonzero().flatten()
    target = layout.targets(lengths, width).to(source.device)
    numbered = replace(
        batch,
        segment_ids=torch.where(real, torch.as_tensor(layout.segments, device=real.device)[:, None], 0),
        position_ids=torch.where(real, real.cumsum(-1) - 1, 0),
    )
    return pytree.tree_map_only(Tensor, lambda values: _move(values, source, target, (len(plan), width)), numbered)


@overload
def unpack(values: TokenBatch, plan: Plan, lengths: Lengths, *, length: int | None = None) -> TokenBatch: ...


@overload
def unpack(values: Tensor, plan: Plan, lengths: Lengths, *, length: int | None = None) -> Tensor: ...


def unpack(
    values: TokenBatch | Shaped[Tensor, "rows cap *rest"], plan: Plan, lengths: Lengths, *, length: int | None = None
) -> TokenBatch | Shaped[Tensor, "batch seq *rest"]:
    """The inverse of `pack`, for a whole batch or for one array (say, logprobs that were computed on the packed rows): one sequence per row, in the
    original order, padded on the right to `length` columns (default: the longest sequence). `lengths` are those that the plan was made of.

    >>> unpack(torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0]]), ((0, 1), (2,)), [3, 1, 2]).tolist()
    [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    """
    sizes = np.asarray(_plain(lengths), dtype=np.int64)
    layout = _layout(plan, sizes)
    if isinstance(values, TokenBatch):
        split = unpack(values.segment_ids, plan, lengths, length=length)
        positions = torch.arange(split.shape[1], device=split.device)
        moved = pytree.tree_map_only(Tensor, lambda array: unpack(array, plan, lengths, length=length), values)
        return replace(moved, segment_ids=(split > 0).long(), position_ids=torch.where(split > 0, positions, 0))
    rows, width = values.shape[:2]
    if rows != len(plan) or width < layout.used.max(initial=0):
        raise ValueError(f"values must have the plan's {len(plan)} rows of at least {layout.used.max(initial=0)} columns, got {rows} rows of {width}")
    longest = int(sizes.max(initial=0))
    if length is not None and length < longest:
        raise ValueError(f"length must hold the longest sequence ({longest} tokens), got {length}")
    length = longest if length is None else length
    source = layout.targets(sizes, width).to(values.device)
    target = _within(sizes, np.arange(len(sizes)) * length).to(values.device)
    return _move(values, source, target, (len(sizes), length))


class _Layout(NamedTuple):
    """Where the sequences of a plan stand: per sequence its row, its first column and its segment number, and per row the tokens in it."""

    rows: np.ndarray
    starts: np.ndarray
    segments: np.ndarray
    used: np.ndarray

    def targets(self, lengths: np.ndarray, width: int) -> Tensor:
        """Per token, sequence by sequence, its place in the flattened rows of `width` columns."""
        return _within(lengths, self.rows * width + self.starts)


def _layout(plan: Plan, lengths: np.ndarray) -> _Layout:
    order = np.fromiter((index for row in plan for index in row), dtype=np.int64)
    counts = np.asarray([len(row) for row in plan], dtype=np.int64)
    times = np.bincount(order[(order >= 0) & (order < len(lengths))], minlength=len(lengths))
    if len(order) != len(lengths) or (times != 1).any():
        wrong = (
            f"sequence {int((times != 1).argmax())} is there {int(times[(times != 1).argmax()])} times"
            if (times != 1).any()
            else f"it holds {len(order)}"
        )
        raise ValueError(f"the plan must hold each of the {len(lengths)} sequences once, {wrong}: make it from this batch's lengths")
    row_of = np.repeat(np.arange(len(plan)), counts)
    sizes = lengths[order]
    used = np.bincount(row_of, weights=sizes, minlength=len(plan)).astype(np.int64)
    filled = np.bincount(row_of, weights=sizes > 0, minlength=len(plan)).astype(np.int64)
    layout = _Layout(np.empty_like(lengths), np.empty_like(lengths), np.empty_like(lengths), used)
    layout.rows[order] = row_of
    layout.starts[order] = np.cumsum(sizes) - sizes - (np.cumsum(used) - used)[row_of]
    layout.segments[order] = np.cumsum(sizes > 0) - (np.cumsum(filled) - filled)[row_of]
    return layout


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
        raise ValueError(f"capacity must hold the fullest row: row {int(used.argmax())} of the plan has {fullest} tokens, capacity is {capacity}")
    if capacity % multiple_of:
        raise ValueError(f"capacity must be a multiple of multiple_of ({multiple_of}), got {capacity}: try {round_up(capacity, multiple_of)}")
    return capacity


def _with_multiple(rows: list[list[int]], sizes: Sequence[int], multiple: int) -> list[list[int]]:
    """Split the fullest rows in two until the number of rows is a multiple; empty rows only when nothing is left to split."""
    rows = list(rows)
    splittable = [(-sum(sizes[index] for index in row), number) for number, row in enumerate(rows) if len(row) > 1]
    heapify(splittable)
    for _ in range(-len(rows) % multiple):
        rows.append([])
        if splittable:
            number = heappop(splittable)[1]
            for place, half in zip((number, len(rows) - 1), _halves(rows[number], sizes), strict=True):
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
    return lengths.tolist() if isinstance(lengths, Tensor | np.ndarray) else [int(length) for length in lengths]

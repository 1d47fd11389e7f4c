"""Rows over ranks and microbatches: pure functions make plans of row indices."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from nemorl.checks import at_least
from nemorl.data.batch import TokenBatch, extents, take, trim
from nemorl.data.packing import Plan, rows_of

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
        longest = max(lengths, default=0)
        if longest > token_budget:
            raise ValueError(
                f"token_budget must hold the longest row: row {lengths.index(longest)} has"
                f" {longest} tokens, token_budget is {token_budget}"
            )
        alone = tuple((row,) for row in range(len(batch)))
        plan = list(_by_padded_tokens(lengths, token_budget, alone if units is None else units))
    else:
        raise ValueError(f"give one of rows ({rows}) and token_budget ({token_budget})")
    return _halved(plan, min_microbatches)


def _halved(plan: list[tuple[int, ...]], count: int) -> Plan:
    while len(plan) < count:
        most = max(range(len(plan)), key=lambda number: len(plan[number]), default=None)
        if most is None or len(plan[most]) < 2:
            return (*plan, *((),) * (count - len(plan)))
        middle = len(plan[most]) // 2
        plan = [*plan[:most], plan[most][:middle], plan[most][middle:], *plan[most + 1 :]]
    return tuple(plan)


def _by_padded_tokens(
    lengths: Sequence[int], budget: int, units: Plan
) -> Iterable[tuple[int, ...]]:
    """Longest first: a microbatch grows while its rows times the longest allow it."""
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
    order = [row for rows in plan for row in rows]
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

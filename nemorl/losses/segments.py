"""Sums and means over the sequences of a row and the groups of a batch, with static shapes."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nemorl.losses.types import PerToken, TokenIds, TokenMask


def at_least_float32(values: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `values` as float32, or as they are if float64: the type of all reductions.

    >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values if values.dtype == torch.float64 else values.float()


def same_segment(segment_ids: TokenIds) -> TokenMask:
    """Return True where a token and the one before it are of one sequence: it is predicted.

    >>> same_segment(torch.tensor([[1, 1, 2, 2, 2, 0]])).int().tolist()
    [[0, 1, 0, 1, 1, 0]]
    """
    before = (
        torch.nn.functional.pad(segment_ids[:, :-1], (1, 0))
        if segment_ids.shape[1]
        else segment_ids
    )
    return (segment_ids > 0) & (segment_ids == before)


def segment_starts(segment_ids: TokenIds) -> TokenMask:
    """Return True at the first token of every sequence.

    >>> segment_starts(torch.tensor([[1, 1, 2, 2, 2, 0]])).int().tolist()
    [[1, 0, 1, 0, 0, 0]]
    """
    return (segment_ids > 0) & ~same_segment(segment_ids)


def segment_totals(
    values: Shaped[Tensor, "batch seq"], segment_ids: TokenIds
) -> Float[Tensor, "batch segments"]:
    """Return the sum over every sequence of a row: column s for segment s, column 0 for padding.

    >>> segment_totals(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[1, 1, 2, 0]])).tolist()
    [[8.0, 3.0, 4.0, 0.0, 0.0]]
    """
    values = at_least_float32(values)
    return values.new_zeros(values.shape[0], values.shape[1] + 1).scatter_add(
        1, segment_ids.long(), values
    )


def segment_sum(
    values: Shaped[Tensor, "batch seq"], segment_ids: TokenIds | None = None
) -> PerToken:
    """Return at every token the sum of `values` over its sequence, 0 on padding.

    Mask `values` first.

    >>> segment_sum(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[1, 1, 2, 0]])).tolist()
    [[3.0, 3.0, 4.0, 0.0]]
    """
    if segment_ids is None:
        return at_least_float32(values).sum(-1, keepdim=True).expand(values.shape)
    sums = segment_totals(values, segment_ids).gather(1, segment_ids.long())
    return torch.where(segment_ids > 0, sums, 0.0)


def segment_mean(
    values: PerToken,
    mask: TokenMask,
    segment_ids: TokenIds | None = None,
) -> PerToken:
    """Return at every token the mean of `values` over its sequence's masked tokens, else 0.

    >>> values = torch.tensor([[1.0, 3.0, 4.0, float("nan")]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> segment_mean(values, mask, torch.tensor([[1, 1, 2, 2]])).tolist()
    [[2.0, 2.0, 4.0, 4.0]]
    """
    total = segment_sum(torch.where(mask, values, 0.0), segment_ids)
    return total / segment_sum(mask, segment_ids).clamp(min=1)


def group_labels(group_id: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return any integer labels as labels below the number of elements, to scatter by.

    >>> group_labels(torch.tensor([70, -3, 70, 9])).tolist()
    [2, 0, 2, 1]
    """
    flat = group_id.flatten().contiguous()
    return torch.searchsorted(flat.sort().values, flat).reshape(group_id.shape)


def group_sum(
    values: Shaped[Tensor, "*shape"], labels: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return at every element the sum of `values` over its group; `labels` are of `group_labels`.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), group_labels(torch.tensor([70, -3, 70]))).tolist()
    [5.0, 2.0, 5.0]
    """
    flat, index = at_least_float32(values).flatten(), labels.flatten()
    return torch.zeros_like(flat).scatter_add(0, index, flat)[index].reshape(values.shape)


def group_extremes(
    values: Shaped[Tensor, "*shape"], labels: Int[Tensor, "*shape"]
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """Return at every element the smallest and the largest of `values` in its group.

    >>> low, high = group_extremes(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]))
    >>> low.tolist(), high.tolist()
    ([1.0, 2.0, 1.0], [4.0, 2.0, 4.0])
    """
    flat, index = values.flatten(), labels.flatten()
    low = flat.scatter_reduce(0, index, flat, "amin", include_self=False)
    high = flat.scatter_reduce(0, index, flat, "amax", include_self=False)
    return low[index].reshape(values.shape), high[index].reshape(values.shape)

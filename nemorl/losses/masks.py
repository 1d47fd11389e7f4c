"""`loss_weights`: how a loss is reduced, decided once for the whole optimizer step, before the
batch is cut into anything (docs/numerics.md, Weighted sums).

Every builder takes the mask of the *whole step* and returns weights that are 0 off the mask. A loss
is then `Σ_t w_t ℓ_t`, and parts of the step add up.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.losses.segments import (
    group_labels,
    group_sum,
    segment_starts,
    segment_sum,
    segment_totals,
)


def token_mean_weights(loss_mask: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch seq"]:
    """w = mask / (included tokens of the step): every token counts the same. An empty mask gives
    zeros.

    Source: DAPO; NeMo RL `token_level_loss=True`, verl `token-mean`, TRL `loss_type="dapo"`.

    >>> token_mean_weights(torch.tensor([[True, True, True], [False, False, True]])).tolist()
    [[0.25, 0.25, 0.25], [0.0, 0.0, 0.25]]
    """
    mask = loss_mask.float()
    return mask / mask.sum().clamp(min=1)


def sequence_mean_weights(
    loss_mask: Bool[Tensor, "batch seq"], segment_ids: Int[Tensor, "batch seq"] | None = None
) -> Float[Tensor, "batch seq"]:
    """w = mask / (included tokens of this sequence · sequences that have any): the mean over
    sequences of each one's token mean.

    Without `segment_ids` every row is one sequence. Source: GRPO as published; NeMo RL
    `token_level_loss=False`, verl `seq-mean-token-mean`, TRL `loss_type="grpo"`.

    >>> sequence_mean_weights(torch.tensor([[True, True], [False, True], [False, False]])).tolist()
    [[0.25, 0.25], [0.0, 0.5], [0.0, 0.0]]
    """
    sums = (
        loss_mask.float().sum(-1)
        if segment_ids is None
        else segment_totals(loss_mask, segment_ids)[:, 1:]
    )
    return loss_mask / (
        segment_sum(loss_mask, segment_ids).clamp(min=1) * (sums > 0).sum().clamp(min=1)
    )


def constant_weights(
    loss_mask: Bool[Tensor, "batch seq"],
    segment_ids: Int[Tensor, "batch seq"] | None = None,
    *,
    length: int,
) -> Float[Tensor, "batch seq"]:
    """w = mask / (number of sequences · length), the same for every token of the run: long answers
    are neither favoured nor spared.

    `length` is a constant in tokens, usually the longest answer allowed. Without `segment_ids`
    every row is one sequence; with them every segment is, also one with an empty mask, while rows
    of nothing but padding are not counted. Raises ValueError if `length` is less than 1. Source:
    Dr. GRPO; verl `seq-mean-token-sum-norm`, TRL `loss_type="dr_grpo"`.

    >>> constant_weights(torch.tensor([[True, True], [False, True]]), length=4).tolist()
    [[0.125, 0.125], [0.0, 0.125]]
    """
    if length < 1:
        raise ValueError(
            f"constant_weights: length must be at least 1 token (got {length}); give the longest"
            " answer that is allowed"
        )
    if segment_ids is None:
        return loss_mask / (float(max(loss_mask.shape[0], 1)) * length)
    return loss_mask / (segment_starts(segment_ids).sum().clamp(min=1).float() * length)


def group_mean_weights(
    loss_mask: Bool[Tensor, "batch seq"], group_id: Int[Tensor, "batch"] | Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """w = mask / (included tokens of this prompt's group · groups that have any): token mean inside
    a group, mean over groups.

    `group_id` holds any integer labels, one per row, or one per token where rows are packed.
    Source: DAPO's objective as its equation is written (its code is `token_mean_weights`).

    >>> group_mean_weights(torch.tensor([[True, True], [True, True], [False, True]]), torch.tensor([7, 7, 3])).tolist()
    [[0.125, 0.125], [0.125, 0.125], [0.0, 0.5]]
    """
    labels = group_labels(
        group_id if group_id.ndim == 2 else group_id[:, None].expand(loss_mask.shape)
    )
    tokens = group_sum(loss_mask, labels)
    present = (
        torch.zeros_like(tokens)
        .flatten()
        .scatter_reduce(0, labels.flatten(), loss_mask.float().flatten(), "amax")
    )
    return loss_mask / (tokens.clamp(min=1) * present.sum().clamp(min=1))

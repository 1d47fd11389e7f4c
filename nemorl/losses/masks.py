"""Builders of `loss_weights`: how a loss is reduced (docs/numerics.md, Weighted sums).

Each takes the mask of the *whole step*, before the batch is cut, and returns weights [batch, seq]
that are 0 off the mask. `segment_ids`: 0 = padding, 1.. = the sequences of a row; None = one
sequence a row.
"""

import torch

from nemorl.checks import at_least
from nemorl.losses.types import (
    PerToken,
    ResponseIds,
    TokenIds,
    TokenMask,
    group_labels,
    group_sum,
    segment_starts,
    segment_sum,
    segment_totals,
)


def token_mean_weights(loss_mask: TokenMask) -> PerToken:
    """Return weights by which every token counts the same: mask / (included tokens of the step).

    Source: DAPO; NeMo RL `token_level_loss=True`, verl `token-mean`, TRL `loss_type="dapo"`.

    >>> token_mean_weights(torch.tensor([[True, True, True], [False, False, True]])).tolist()
    [[0.25, 0.25, 0.25], [0.0, 0.0, 0.25]]
    """
    mask = loss_mask.float()
    return mask / mask.sum().clamp(min=1)


def sequence_mean_weights(loss_mask: TokenMask, segment_ids: TokenIds | None = None) -> PerToken:
    """Return weights by which every sequence counts the same, whatever its length.

    w = mask / (included tokens of this sequence · sequences that have any).
    Source: GRPO; NeMo RL `token_level_loss=False`, verl `seq-mean-token-mean`, TRL
    `loss_type="grpo"`.

    >>> sequence_mean_weights(torch.tensor([[True, True], [False, True], [False, False]])).tolist()
    [[0.25, 0.25], [0.0, 0.5], [0.0, 0.0]]
    """
    sums = loss_mask.float().sum(-1)
    if segment_ids is not None:
        sums = segment_totals(loss_mask, segment_ids)[:, 1:]
    return loss_mask / (
        segment_sum(loss_mask, segment_ids).clamp(min=1) * (sums > 0).sum().clamp(min=1)
    )


def constant_weights(
    loss_mask: TokenMask, segment_ids: TokenIds | None = None, *, length: int
) -> PerToken:
    """Return the same weight for every token of a run: mask / (number of sequences · length).

    `length` is a constant in tokens, usually the longest answer allowed. A segment with an empty
    mask is a sequence, a row of padding is none. Raises: ValueError if `length` is less than 1.
    Source: Dr. GRPO; verl `seq-mean-token-sum-norm`, TRL `loss_type="dr_grpo"`.

    >>> constant_weights(torch.tensor([[True, True], [False, True]]), length=4).tolist()
    [[0.125, 0.125], [0.0, 0.125]]
    """
    at_least(1, length=length)
    if segment_ids is None:
        return loss_mask / (float(max(loss_mask.shape[0], 1)) * length)
    return loss_mask / (segment_starts(segment_ids).sum().clamp(min=1).float() * length)


def group_mean_weights(loss_mask: TokenMask, group_id: ResponseIds | TokenIds) -> PerToken:
    """Return weights of the token mean inside a prompt's group, and the mean over groups.

    w = mask / (included tokens of this group · groups that have any). `group_id`: any integers, one
    per row, or one per token of packed rows.
    Source: DAPO's equation (its code is `token_mean_weights`).

    >>> mask = torch.tensor([[True, True], [True, True], [False, True]])
    >>> group_mean_weights(mask, torch.tensor([7, 7, 3])).tolist()
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

"""What happens to rewards before they become advantages: scaling, shaping by length, and the choice
of groups that carry information.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.losses.segments import at_least_float32, group_extremes, group_labels


def scale_rewards(
    rewards: Float[Tensor, "batch"],
    *,
    source_min: float = 0.0,
    source_max: float = 1.0,
    target_min: float = 0.0,
    target_max: float = 1.0,
) -> Float[Tensor, "batch"]:
    """[source_min, source_max] mapped linearly onto [target_min, target_max]; what lies outside is
    clamped to the ends first.

    Raises ValueError if source_max is not above source_min. Source: NeMo RL `reward_scaling`.

    >>> scale_rewards(torch.tensor([0.0, 0.5, 2.0]), target_min=-1.0).tolist()
    [-1.0, 0.0, 1.0]
    """
    if not source_max > source_min:
        raise ValueError(
            f"scale_rewards: source_max must be above source_min (got {source_max} and"
            f" {source_min}); give the range that the rewards have"
        )
    share = (at_least_float32(rewards).clamp(source_min, source_max) - source_min) / (
        source_max - source_min
    )
    return target_min + share * (target_max - target_min)


def overlong_penalty(
    lengths: Int[Tensor, "batch"], *, max_length: int, buffer: int, penalty: float = 1.0
) -> Float[Tensor, "batch"]:
    """What to *add* to a reward: 0 up to max_length − buffer tokens, then falling linearly to
    −penalty at max_length, where it stays.

    Raises ValueError unless 0 < buffer ≤ max_length and penalty ≥ 0. Source: DAPO's soft overlong
    punishment; NeMo RL `overlong_buffer_length` and `overlong_buffer_penalty` (whose penalty grows
    without bound past max_length; ours stays), verl `overlong_buffer`.

    >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 150]), max_length=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"overlong_penalty: buffer must be above 0 and at most max_length = {max_length} tokens"
            f" (got {buffer})"
        )
    if penalty < 0:
        raise ValueError(
            f"overlong_penalty: penalty must be at least 0 (got {penalty}); it is subtracted from"
            " the reward"
        )
    over = (lengths - (max_length - buffer)).clamp(0, buffer)
    return 0.0 - over / buffer * penalty


def overlong_filter(
    loss_mask: Bool[Tensor, "batch seq"], truncated: Bool[Tensor, "batch"]
) -> Bool[Tensor, "batch seq"]:
    """The loss mask without the sequences that were cut off at the length limit, about whose
    quality the reward says nothing.

    Build `loss_weights` from the result. Source: DAPO's overlong filtering; NeMo RL
    `overlong_filtering`, TRL `mask_truncated_completions`.

    >>> overlong_filter(torch.tensor([[False, True], [True, True]]), torch.tensor([False, True])).int().tolist()
    [[0, 1], [0, 0]]
    """
    return loss_mask & ~truncated[:, None]


def stop_properly(
    rewards: Float[Tensor, "batch"], truncated: Bool[Tensor, "batch"], *, factor: float
) -> Float[Tensor, "batch"]:
    """The rewards of truncated responses times `factor`: 0 takes them away, 1 leaves them.

    Meant for rewards of at least 0 (a negative one would become milder). Raises ValueError unless 0
    ≤ factor ≤ 1. Source: ProRL v2; NeMo RL and OpenRLHF `stop_properly_penalty_coef`.

    >>> stop_properly(torch.tensor([1.0, 1.0]), torch.tensor([False, True]), factor=0.25).tolist()
    [1.0, 0.25]
    """
    if not 0 <= factor <= 1:
        raise ValueError(
            f"stop_properly: factor must be from 0 to 1 (got {factor}); 0 takes the reward of"
            " truncated responses away"
        )
    return torch.where(truncated, at_least_float32(rewards) * factor, at_least_float32(rewards))


def informative_groups(
    rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]
) -> Bool[Tensor, "batch"]:
    """True for every member of a group whose rewards are not all equal: the groups that dynamic
    sampling keeps, always whole.

    `group_id`: any integer labels, in any order, groups of any size; a group of one is never
    informative. Give it the task's own rewards, before shaping by length. Source: DAPO's dynamic
    sampling; NeMo RL `use_dynamic_sampling`.

    >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([5, 8, 5, 8])).tolist()
    [True, False, True, False]
    """
    low, high = group_extremes(rewards, group_labels(group_id))
    return low != high

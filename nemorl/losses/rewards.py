"""Rewards before they become advantages (docs/numerics.md, Reward transforms)."""

import torch  # noqa: F401  (of the examples)

from nemorl.checks import at_least, require
from nemorl.losses.segments import at_least_float32, group_extremes, group_labels
from nemorl.losses.types import PerResponse, ResponseIds, ResponseMask


def scale_rewards(
    rewards: PerResponse,
    *,
    source_min: float = 0.0,
    source_max: float = 1.0,
    target_min: float = 0.0,
    target_max: float = 1.0,
) -> PerResponse:
    """Return rewards mapped linearly from [source_min, source_max] onto [target_min, target_max].

    Rewards outside are clamped first. Raises: ValueError unless source_max > source_min.
    Source: NeMo RL `reward_scaling`.

    >>> scale_rewards(torch.tensor([0.0, 0.5, 2.0]), target_min=-1.0).tolist()
    [-1.0, 0.0, 1.0]
    """
    size = source_max - source_min
    require(
        size > 0, "source_max", "must be above source_min", source_max, "give the rewards' range"
    )
    share = (at_least_float32(rewards).clamp(source_min, source_max) - source_min) / size
    return target_min + share * (target_max - target_min)


def overlong_penalty(
    lengths: ResponseIds, *, max_length: int, buffer: int, penalty: float = 1.0
) -> PerResponse:
    """Return what to *add* to rewards for the `lengths` of responses, in tokens.

    0 up to max_length − buffer, then falling linearly to −penalty at max_length, where it stays.

    Raises: ValueError unless 0 < buffer ≤ max_length and penalty ≥ 0.
    Source: DAPO's soft overlong punishment; verl `overlong_buffer`; NeMo RL
    `overlong_buffer_length` and `overlong_buffer_penalty`, which grows on past max_length.

    >>> lengths = torch.tensor([60, 80, 90, 100, 150])
    >>> overlong_penalty(lengths, max_length=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    limit = f"use 1 to max_length = {max_length}"
    require(0 < buffer <= max_length, "buffer", "must be from 1 to max_length", buffer, limit)
    at_least(0, penalty=penalty)
    over = (lengths - (max_length - buffer)).clamp(0, buffer)
    return 0.0 - over / buffer * penalty


def informative_groups(rewards: PerResponse, group_id: ResponseIds) -> ResponseMask:
    """Return True for every member of a group whose rewards are not all equal.

    A group of one is never informative. `group_id`: any integers. Give it the task's own rewards,
    before shaping by length: DAPO's condition is on correct answers.
    Source: DAPO's dynamic sampling, equation 11; verl `filter_groups`; NeMo RL
    `use_dynamic_sampling`.

    >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([5, 8, 5, 8])).tolist()
    [True, False, True, False]
    """
    low, high = group_extremes(rewards, group_labels(group_id))
    return low != high

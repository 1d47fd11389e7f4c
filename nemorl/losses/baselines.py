"""The general form of a response's advantage; its presets are in advantages.py.

Computed in float64: the arrays are small. Groups need be neither contiguous nor equal in size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemorl.losses.masked import require_one_of
from nemorl.losses.segments import at_least_float32, group_extremes, group_labels, group_sum
from nemorl.losses.types import PerResponse, ResponseIds

BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none", "greedy", "length_weighted")
SCALES = ("group_std", "leave_one_out_std", "batch_std", "none")

EPSILON = 1e-6


class Group(NamedTuple):
    """At every reward about its group."""

    labels: Tensor
    size: Tensor
    mean: Tensor
    centred: Tensor
    squares: Tensor
    """The group's sum of `centred`²."""
    low: Tensor
    high: Tensor


def members(rewards: PerResponse, group_id: ResponseIds) -> Group:
    """Return the statistics of each reward's group.

    >>> members(torch.tensor([1.0, 5.0]), torch.tensor([0, 0])).mean.tolist()
    [3.0, 3.0]
    """
    labels = group_labels(group_id)
    size = group_sum(torch.ones_like(rewards), labels)
    low, high = group_extremes(rewards, labels)
    mean = torch.where(low == high, rewards, group_sum(rewards, labels) / size)
    centred = rewards - mean
    return Group(labels, size, mean, centred, group_sum(centred.square(), labels), low, high)


def _others_equal(rewards: Tensor, group: Group) -> Tensor:
    """Whether the *other* members all have the same reward: all are low or all high."""

    def among_others(end: Tensor) -> Tensor:
        at_end = (rewards == end).to(rewards.dtype)
        return group_sum(at_end, group.labels) - at_end

    return (among_others(group.low) == group.size - 1) | (
        among_others(group.high) == group.size - 1
    )


def _baseline(
    rewards: Tensor,
    group: Group,
    everything: Group,
    name: str,
    lengths: Tensor | None,
    greedy_rewards: Tensor | None,
) -> Tensor:
    if name == "group_mean":
        return group.mean
    if name == "leave_one_out":
        return group.mean - group.centred / (group.size - 1).clamp(min=1)
    if name == "batch_mean":
        return everything.mean
    if greedy_rewards is not None:
        return greedy_rewards.to(rewards.dtype)
    if lengths is not None:
        return group.mean + group_sum(lengths * group.centred, group.labels) / group_sum(
            lengths, group.labels
        ).clamp(min=1)
    return torch.zeros_like(rewards)


def _scale(rewards: Tensor, group: Group, everything: Group, name: str, ddof: int) -> Tensor:
    if name == "none":
        return torch.ones_like(rewards)
    if name == "leave_one_out_std":
        # Σ over the others of (R − their mean)²
        squares = group.squares - group.centred.square() * group.size / (group.size - 1).clamp(
            min=1
        )
        count, flat = group.size - 1, _others_equal(rewards, group)
    else:
        members = group if name == "group_std" else everything
        squares, count, flat = members.squares, members.size, members.low == members.high
    std = (squares.clamp(min=0) / (count - ddof).clamp(min=1)).sqrt()
    return torch.where(flat | (count <= ddof), 1.0, std + EPSILON)


def advantages(
    rewards: PerResponse,
    group_id: ResponseIds,
    *,
    baseline: str = "group_mean",
    scale: str = "group_std",
    ddof: int = 1,
    lengths: ResponseIds | None = None,
    greedy_rewards: PerResponse | None = None,
) -> PerResponse:
    """Return A = (R − b) / (σ + 1e-6) for every response, with b and σ chosen apart.

    Where all rewards that b or σ is taken over are exactly equal, A is exactly 0; so a group of one
    learns nothing. Where σ alone is 0 or undefined (leave_one_out_std with the others all equal),
    R − b is left unscaled, as in NeMo RL.

    Args:
        rewards: R.
        group_id: any integer labels of the prompts.
        baseline: b: group_mean; leave_one_out, the mean of the *other* members (RLOO); batch_mean;
            none = 0; greedy, `greedy_rewards` (ReMax); length_weighted, Σ len·R / Σ len (OPO).
        scale: σ: group_std; leave_one_out_std, of the other members (NeMo RL); batch_std; none = 1.
        ddof: standard deviations divide by their count − ddof.
        lengths: of the responses in tokens, for length_weighted.
        greedy_rewards: of the prompts' greedy answers, for greedy.
    Raises: ValueError for an unknown name, and if `lengths` or `greedy_rewards` are missing or not
    used.

    >>> advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([8, 8, 2, 2]))
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    require_one_of("baseline", baseline, BASELINES)
    require_one_of("scale", scale, SCALES)
    for field, value, user in (
        ("lengths", lengths, "length_weighted"),
        ("greedy_rewards", greedy_rewards, "greedy"),
    ):
        if (value is not None) != (baseline == user):
            raise ValueError(
                f"{field} must be given with baseline={user!r} and no other, but baseline is"
                f" {baseline!r} and {field} {'missing' if value is None else 'given'}"
            )
    exact = rewards.double()
    group, everything = members(exact, group_id), members(exact, torch.zeros_like(group_id))
    difference = exact - _baseline(exact, group, everything, baseline, lengths, greedy_rewards)
    result = difference / _scale(exact, group, everything, scale, ddof)
    if baseline in ("group_mean", "leave_one_out", "length_weighted") or scale in (
        "group_std",
        "leave_one_out_std",
    ):
        result = torch.where(group.low == group.high, 0.0, result)
    if baseline == "batch_mean" or scale == "batch_std":
        result = torch.where(everything.low == everything.high, 0.0, result)
    return result.to(at_least_float32(rewards).dtype).detach()

"""Advantages: how much better a response, or a token of it, was than expected.

`advantages` is the general form; its presets are here, and other estimators. All are
constants for the gradient. `group_id`: any integers, equal for the responses to one prompt.
Token-level functions take one sequence a row: advantages precede packing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from nemorl.checks import at_least, require
from nemorl.losses.types import (
    PerResponse,
    PerToken,
    ResponseIds,
    ResponseMask,
    TokenIds,
    TokenMask,
    at_least_float32,
    group_extremes,
    group_labels,
    group_sum,
    masked,
    max_of,
    min_of,
    require_one_of,
)

BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none", "greedy", "length_weighted")
SCALES = ("group_std", "leave_one_out_std", "group_mean", "batch_std", "none")

EPSILON = 1e-6


class GroupStatistics(NamedTuple):
    """At every reward about its group."""

    labels: Tensor
    size: Tensor
    mean: Tensor
    centred: Tensor
    squares: Tensor
    """The group's sum of `centred`²."""
    low: Tensor
    high: Tensor


def members(rewards: PerResponse, group_id: ResponseIds) -> GroupStatistics:
    """Return the statistics of each reward's group.

    >>> members(torch.tensor([1.0, 5.0]), torch.tensor([0, 0])).mean.tolist()
    [3.0, 3.0]
    """
    labels = group_labels(group_id)
    size = group_sum(torch.ones_like(rewards), labels)
    low, high = group_extremes(rewards, labels)
    mean = torch.where(low == high, rewards, group_sum(rewards, labels) / size)
    centred = rewards - mean
    return GroupStatistics(
        labels, size, mean, centred, group_sum(centred.square(), labels), low, high
    )


def _baseline(
    rewards: Tensor,
    group: GroupStatistics,
    everything: GroupStatistics,
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


def _scale(
    rewards: Tensor, group: GroupStatistics, everything: GroupStatistics, name: str, ddof: int
) -> Tensor:
    if name == "none":
        return torch.ones_like(rewards)
    if name == "group_mean":
        return torch.where(group.mean > 0, group.mean, torch.inf)
    if name == "leave_one_out_std":
        # Σ over the others of (R − their mean)²
        squares = group.squares - group.centred.square() * group.size / (group.size - 1).clamp(
            min=1
        )
        # The *others* are all equal where none is not low, or none not high.
        unlike = ((rewards != end).to(rewards.dtype) for end in (group.low, group.high))
        not_low, not_high = (group_sum(each, group.labels) - each for each in unlike)
        count, flat = group.size - 1, (not_low == 0) | (not_high == 0)
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
        scale: σ: group_std; leave_one_out_std, of the other members (NeMo RL); batch_std; none = 1;
            group_mean, without the 1e-6, and A = 0 where it is not above 0 (MaxRL).
        ddof: standard deviations divide by their count − ddof.
        lengths: of the responses in tokens, for length_weighted.
        greedy_rewards: of the prompts' greedy answers, for greedy.
    Raises: ValueError for an unknown name, and for arrays that are missing or not used.

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
    of_groups = {"group_mean", "leave_one_out", "length_weighted", "group_std", "leave_one_out_std"}
    if of_groups & {baseline, scale}:
        result = torch.where(group.low == group.high, 0.0, result)
    if baseline == "batch_mean" or scale == "batch_std":
        result = torch.where(everything.low == everything.high, 0.0, result)
    return result.to(at_least_float32(rewards).dtype).detach()


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
    require(
        0 < buffer <= max_length,
        "buffer",
        "must be from 1 to max_length",
        buffer,
        f"use 1 to max_length = {max_length}",
    )
    at_least(0, penalty=penalty)
    over = (lengths - (max_length - buffer)).clamp(0, buffer)
    return 0.0 - over / buffer * penalty


def informative_groups(rewards: PerResponse, group_id: ResponseIds) -> ResponseMask:
    """Return True for every member of a group whose rewards are not all equal.

    A group of one is never informative. Give it the task's own rewards, before shaping by length:
    DAPO's condition is on correct answers.
    Source: DAPO's dynamic sampling, equation 11; verl `filter_groups`; NeMo RL
    `use_dynamic_sampling`.

    >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([5, 8, 5, 8])).tolist()
    [True, False, True, False]
    """
    low, high = group_extremes(rewards, group_labels(group_id))
    return low != high


def grpo(rewards: PerResponse, group_id: ResponseIds) -> PerResponse:
    """Return advantages of GRPO: group_mean + group_std.

    Source: DeepSeekMath; verl `adv_estimator=grpo`, TRL `scale_rewards="group"` (which adds 1e-4,
    not 1e-6).

    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1, 1, 2, 2]))
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071])
    """
    return advantages(rewards, group_id)


def rloo(rewards: PerResponse, group_id: ResponseIds) -> PerResponse:
    """Return advantages of RLOO: leave_one_out + none.

    Source: "Back to Basics"; NeMo RL `use_leave_one_out_baseline=True, normalize_rewards=False`.

    >>> rloo(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, 1, 1])).tolist()
    [0.0, -1.5, 1.5]
    """
    return advantages(rewards, group_id, baseline="leave_one_out", scale="none")


def dr_grpo(rewards: PerResponse, group_id: ResponseIds) -> PerResponse:
    """Return advantages of Dr. GRPO: group_mean + none, meant for `constant_weights`.

    Source: "Understanding R1-Zero-Like Training"; TRL `scale_rewards="none"`, verl
    `norm_adv_by_std_in_grpo=False`.

    >>> dr_grpo(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, 1, 1])).tolist()
    [0.0, -1.0, 1.0]
    """
    return advantages(rewards, group_id, scale="none")


def nemo_grpo(rewards: PerResponse, group_id: ResponseIds) -> PerResponse:
    """Return advantages of NeMo RL's default: leave_one_out + leave_one_out_std.

    Source: `use_leave_one_out_baseline=True, normalize_rewards=True`.

    >>> nemo_grpo(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1, 1, 1]))  # others of 4: 1 ± √2
    tensor([-2.1213,  0.0000,  2.1213])
    """
    return advantages(rewards, group_id, baseline="leave_one_out", scale="leave_one_out_std")


def gdpo(
    reward_components: Float[Tensor, "batch components"],
    group_id: ResponseIds,
    *,
    weights: Sequence[float],
    baseline: str = "group_mean",
    scale: str = "group_std",
) -> PerResponse:
    """Return advantages of several rewards, each normalized in its group first.

    A = Σ_k w_k (R_k − b_k)/(σ_k + 1e-6), then (A − mean)/(σ + 1e-6) over the batch. `baseline` and
    `scale` as in `advantages`. Raises: ValueError unless there is one weight per component.
    Source: GDPO; TRL `multi_objective_aggregation="normalize_then_sum"`, NeMo RL
    `adv_estimator.name=gdpo` (there baseline="leave_one_out", scale="leave_one_out_std").

    >>> gdpo(torch.tensor([[1.0, 0.0], [0.0, 100.0]]), torch.tensor([1, 1]), weights=(2.0, 1.0))
    tensor([ 0.7071, -0.7071])
    """
    columns = reward_components.double().unbind(-1)
    if len(weights) != len(columns):
        raise ValueError(
            f"weights must have one number per reward component, {len(columns)}, got {weights}"
        )
    parts = [
        weight * advantages(column, group_id, baseline=baseline, scale=scale)
        for weight, column in zip(weights, columns, strict=True)
    ]
    total = torch.stack(parts).sum(0)
    normalised = advantages(total, group_id, baseline="batch_mean", scale="batch_std")
    return normalised.to(at_least_float32(reward_components).dtype)


def pass_at_k(rewards: PerResponse, group_id: ResponseIds, *, k: int) -> PerResponse:
    """Return the advantage whose policy gradient is an unbiased estimate of ∇ pass@k.

    For rewards other than 0 and 1: of ∇ E[max reward of k answers]. A_i = k · mean over the sets S
    of k − 1 other members of (max(R_i, max S) − max S). With c of n answers right that is
    k · C(n−c, k−1) / C(n−1, k−1) for a right one, 0 for a wrong one; k = 1 is `rloo`. A group of
    fewer than k members gives 0. The estimate is the group's mean of A_i ∇ log π(y_i). Memory:
    O(batch²). Raises: ValueError if k is less than 1.
    Source: Walder and Karkhanis, "Pass@K Policy Optimization" (2025), "leave one out minus one".

    >>> pass_at_k(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1, 1, 1]), k=2).tolist()
    [2.0, 0.0, 0.0]
    """
    at_least(1, k=k)
    if k == 1:
        return rloo(rewards, group_id)
    exact = rewards.double()
    index = torch.arange(len(exact), device=exact.device)
    same = group_id[:, None] == group_id[None, :]
    lower = same & (exact[None, :] < exact[:, None])  # [i, j]: j is below i
    tied_before = same & (exact[None, :] == exact[:, None]) & (index[None, :] < index[:, None])
    rank, size = (lower | tied_before).sum(-1).double(), same.sum(-1).double()
    # The share of the sets of k - 1 others in which j is the best: C(rank_j, k-2) / C(size-1, k-1).
    best = (k - 1) / (size - 1).clamp(min=1)
    for step in range(k - 2):
        best = best * (rank - step).clamp(min=0) / (size - 2 - step).clamp(min=1)
    gain = torch.where(lower, (exact[:, None] - exact[None, :]) * best[None, :], 0.0).sum(-1)
    return (k * torch.where(size >= k, gain, 0.0)).to(at_least_float32(rewards).dtype).detach()


def max_rl(rewards: PerResponse, group_id: ResponseIds) -> PerResponse:
    """Return advantages of MaxRL, group_mean + group_mean, for rewards of at least 0.

    Its gradient estimates the gradient of −Σ_{k < n} (1 − p)^k / k, the
    log-likelihood log p of a right answer truncated by the group's size n.
    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026); TRL
    `scale_rewards="mean"`.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1, 1, 1, 1])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    return advantages(rewards, group_id, scale="group_mean")


def to_tokens(advantages: PerResponse, mask: TokenMask) -> PerToken:
    """Return a sequence's advantage at each of its masked tokens, 0 elsewhere.

    >>> to_tokens(torch.tensor([0.5, -1.0]), torch.tensor([[False, True], [True, True]])).tolist()
    [[0.0, 0.5], [-1.0, -1.0]]
    """
    return torch.where(mask, advantages[:, None], 0.0)


def to_turns(
    advantages: Float[Tensor, "turns"],
    turns: TokenIds,
    mask: TokenMask,
    counts: ResponseIds | None = None,
) -> PerToken:
    """Return a turn's advantage at each of its masked tokens, 0 elsewhere.

    advantages: of the first row's turns, then the second's. turns: each token's turn of its row,
    from 1; 0 of none. counts: turns of each row, needed where the last one has no token.

    >>> turns, mask = torch.tensor([[1, 0, 2], [1, 1, 0]]), torch.ones(2, 3, dtype=torch.bool)
    >>> to_turns(torch.tensor([0.5, -1.0, 2.0]), turns, mask).tolist()
    [[0.5, 0.0, -1.0], [2.0, 2.0, 0.0]]
    """
    if counts is None:
        counts = turns.amax(-1) if turns.shape[1] else turns.sum(-1)
    index = turns + (counts.cumsum(0) - counts)[:, None]
    known = torch.cat([advantages.new_zeros(1), advantages])
    return torch.where(mask & (turns > 0), known[torch.where(turns > 0, index, 0)], 0.0)


def at_last_token(rewards: PerResponse, mask: TokenMask) -> PerToken:
    """Return a sequence's reward at its last masked token, 0 elsewhere, as `gae` expects it.

    >>> at_last_token(torch.tensor([0.5]), torch.tensor([[False, True, True, False]])).tolist()
    [[0.0, 0.0, 0.5, 0.0]]
    """
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (after == 1), rewards[:, None], 0.0)


def whiten(values: PerToken, mask: TokenMask, *, ddof: int = 1) -> PerToken:
    """Return (V − mean) / (σ + 1e-6) over all masked tokens of the step, 0 elsewhere.

    Values that are all exactly equal give exactly 0. σ divides by the count − `ddof`.
    Source: verl `masked_whiten` (1e-8, under the root); NeMo RL's REINFORCE++ has ddof=0.

    >>> whiten(torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    exact = torch.where(mask, values.double(), 0.0)
    count = mask.sum()
    centred = torch.where(mask, exact - exact.sum() / count.clamp(min=1), 0.0)
    std = (centred.square().sum() / (count - ddof).clamp(min=1)).sqrt()
    differ = min_of(values, mask).value < max_of(values, mask).value
    result = torch.where(differ, centred / (std + EPSILON), 0.0)
    return result.to(at_least_float32(values).dtype).detach()


def reinforce_plus_plus(
    rewards: PerResponse,
    kl: PerToken,
    mask: TokenMask,
    *,
    kl_coef: float,
    group_id: ResponseIds | None = None,
    kl_to_go: bool = True,
    ddof: int = 1,
) -> PerToken:
    """Return advantages of REINFORCE++, whitened over the masked tokens of the batch.

    whiten(R − b − kl_coef · Σ_{s ≥ t} kl_s): the return of a per-token reward −kl_coef·kl and a
    terminal reward R, without a critic.

    Args:
        rewards: R.
        kl: usually k1 of π_prev, k2 with a baseline.
        mask: the response's tokens.
        group_id: b = the mean of the prompt's group ("REINFORCE++-baseline"); None: b = 0.
        kl_to_go: False charges a token with its own kl only, as NeMo RL does.
        ddof: of `whiten`; 0 in NeMo RL.
    Source: OpenRLHF `--advantage_estimator reinforce` and `reinforce_baseline`, NeMo RL
    `adv_estimator.name=reinforce_plus_plus` with `minus_baseline`.

    >>> mask = torch.tensor([[True, True], [False, True]])
    >>> kl = torch.tensor([[1.0, 1.0], [9.0, 0.0]])  # returns 1 − 0.5·(2, 1) and −1
    >>> reinforce_plus_plus(torch.tensor([1.0, -1.0]), kl, mask, kl_coef=0.5)
    tensor([[ 0.2182,  0.8729],
            [ 0.0000, -1.0911]])
    """
    outcome = rewards if group_id is None else advantages(rewards, group_id, scale="none")
    cost = masked(mask, kl)
    if kl_to_go:
        cost = cost.flip(-1).cumsum(-1).flip(-1)
    return whiten(at_least_float32(outcome)[:, None] - kl_coef * cost, mask, ddof=ddof)


def _scan_back(values: Tensor, decay: Tensor) -> Tensor:
    """x_t = values_t + decay_t · x_{t+1} along the last axis, by doubling: log2(seq) passes."""
    step = 1
    while step < values.shape[-1]:
        values = values + decay * pad(values[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return values


def gae(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    *,
    gamma: float = 1.0,
    lam: float | PerResponse = 0.95,
    value_lam: float | PerResponse | None = None,
) -> tuple[PerToken, PerToken]:
    """Return generalized advantage estimates and returns, both 0 off the mask.

    δ_t = r_t + γ V_next − V_t, A_t = δ_t + γλ A_next, where "next" is the sequence's next *masked*
    token: tool output and observations are not read. After the last one both are 0.

    Args:
        rewards: r; for the reward of the whole see `at_last_token`.
        values: V before each token.
        mask: the response's tokens.
        gamma, lam: γ and λ.
        value_lam: λ of the returns A + V; None = `lam`. VAPO: 1, with 0.95 or
            `length_adaptive_lambda` for the policy.
    Source: Schulman et al. (2016); verl `adv_estimator=gae`, NeMo RL `gae_lambda`,
    `gae_lambda_policy`, `gae_lambda_value`.

    >>> mask = torch.tensor([[True, False, True]])  # the middle token is an observation
    >>> rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.25, 9.0, 0.5]])
    >>> gae(rewards, values, mask, gamma=0.5, lam=0.5)  # δ = 0 and 0.5
    (tensor([[0.1250, 0.0000, 0.5000]]), tensor([[0.3750, 0.0000, 1.0000]]))
    """
    values, rewards = (masked(mask, x.detach()) for x in (values, rewards))
    # The value of this token, or of the next masked one.
    carried = _scan_back(values, (~mask).to(values.dtype))
    delta = torch.where(mask, rewards + gamma * pad(carried[:, 1:], (0, 1)) - values, 0.0)

    def discounted(lam: float | Tensor) -> Tensor:
        decay = gamma * (lam[:, None].to(values.dtype) if isinstance(lam, Tensor) else lam)
        every = _scan_back(delta, torch.where(mask, decay, torch.ones_like(values)))
        return torch.where(mask, every, 0.0)

    policy = discounted(lam)
    return policy, values + (policy if value_lam is None else discounted(value_lam))


def length_adaptive_lambda(lengths: ResponseIds, *, alpha: float = 0.05) -> PerResponse:
    """Return λ = 1 − 1/(alpha · length), at least 0, for `gae`, from response `lengths` in tokens.

    Raises: ValueError unless alpha > 0. Source: VAPO, 0.05; NeMo RL `length_adaptive_alpha`.

    >>> length_adaptive_lambda(torch.tensor([10, 40])).tolist()
    [0.0, 0.5]
    """
    require(alpha > 0, "alpha", "must be above 0", alpha, "VAPO uses 0.05")
    return (1 - 1 / (alpha * lengths.clamp(min=1).float())).clamp(min=0)


def opd(teacher_logprobs: PerToken, prev_logprobs: PerToken, mask: TokenMask) -> PerToken:
    """Return advantages of on-policy distillation: sg(log π_teacher − log π_prev) on the mask.

    Source: "On-Policy Distillation" (Thinking Machines, 2025); NeMo RL `adv_estimator.name=opd`.

    >>> mask = torch.tensor([[False, True]])
    >>> opd(torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -3.0]]), mask).tolist()
    [[0.0, 2.0]]
    """
    return masked(mask, teacher_logprobs.detach()) - masked(mask, prev_logprobs.detach())

"""Advantages: how much better a response, or a token of it, was than expected. All are constants
for the gradient.

The general form is `advantages` (baselines.py); here are its named presets and what has another
form. `group_id` marks the responses to one prompt by any integer labels. Token-level functions take
one sequence per row: advantages come before packing.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.losses.baselines import EPSILON, advantages, group_advantages, members
from nemorl.losses.segments import at_least_float32

__all__ = [
    "advantages",
    "at_last_token",
    "dr_grpo",
    "gae",
    "gdpo",
    "group_advantages",
    "grpo",
    "length_adaptive_lambda",
    "max_rl",
    "nemo_grpo",
    "opd",
    "pass_at_k",
    "reinforce_plus_plus",
    "rloo",
    "to_tokens",
    "whiten",
]


def grpo(rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """group_mean + group_std. Source: GRPO (DeepSeekMath); verl `adv_estimator=grpo`, TRL
    `scale_rewards="group"` (which adds 1e-4, not 1e-6).

    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1, 1, 2, 2]))
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071])
    """
    return advantages(rewards, group_id)


def rloo(rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """leave_one_out + none. Source: "Back to Basics" (RLOO); NeMo RL
    `use_leave_one_out_baseline=True, normalize_rewards=False`.

    >>> rloo(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, 1, 1])).tolist()
    [0.0, -1.5, 1.5]
    """
    return advantages(rewards, group_id, baseline="leave_one_out", scale="none")


def dr_grpo(
    rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]
) -> Float[Tensor, "batch"]:
    """group_mean + none, meant for `constant_weights`. Source: "Understanding R1-Zero-Like
    Training" (Dr. GRPO); TRL `scale_rewards="none"`, verl `norm_adv_by_std_in_grpo=False`.

    >>> dr_grpo(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, 1, 1])).tolist()
    [0.0, -1.0, 1.0]
    """
    return advantages(rewards, group_id, scale="none")


def nemo_grpo(
    rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]
) -> Float[Tensor, "batch"]:
    """leave_one_out + leave_one_out_std. Source: NeMo RL's default,
    `use_leave_one_out_baseline=True, normalize_rewards=True`.

    The others of the last member are 0 and 2: mean 1, σ = √2.

    >>> nemo_grpo(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1, 1, 1]))
    tensor([-2.1213,  0.0000,  2.1213])
    """
    return advantages(rewards, group_id, baseline="leave_one_out", scale="leave_one_out_std")


def gdpo(
    reward_components: Float[Tensor, "batch components"],
    group_id: Int[Tensor, "batch"],
    *,
    weights: Sequence[float],
    baseline: str = "group_mean",
    scale: str = "group_std",
) -> Float[Tensor, "batch"]:
    """Several rewards, each made an advantage in its group first: Σ_k w_k (R_k − b_k)/(σ_k + 1e-6),
    then (A − mean)/(σ + 1e-6) over the batch.

    So no component drowns another because its numbers are larger. Raises ValueError unless there is
    one weight per component. Source: GDPO; TRL `multi_objective_aggregation="normalize_then_sum"`,
    NeMo RL `adv_estimator.name=gdpo` (leave-one-out there: `baseline="leave_one_out",
    scale="leave_one_out_std"`).

    >>> gdpo(torch.tensor([[1.0, 0.0], [0.0, 100.0]]), torch.tensor([1, 1]), weights=(2.0, 1.0))
    tensor([ 0.7071, -0.7071])
    """
    if len(weights) != reward_components.shape[1]:
        raise ValueError(
            f"gdpo: weights must have one number per reward component, {reward_components.shape[1]}"
            f" (got {len(weights)})"
        )
    columns = [
        advantages(column, group_id, baseline=baseline, scale=scale)
        for column in reward_components.double().unbind(-1)
    ]
    total = torch.stack(
        [weight * column for weight, column in zip(weights, columns, strict=True)]
    ).sum(0)
    normalised = advantages(total, group_id, baseline="batch_mean", scale="batch_std")
    return normalised.to(at_least_float32(reward_components).dtype)


def pass_at_k(
    rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"], *, k: int
) -> Float[Tensor, "batch"]:
    """The advantage whose policy gradient is an unbiased estimate of ∇ E[max reward of k answers],
    which for rewards of 0 and 1 is ∇ pass@k.

    A_i = k · mean over the sets S of k − 1 other members of (max(R_i, max S) − max S): what answer
    i adds to k − 1 others. With c of n answers right that is k · C(n−c, k−1) / C(n−1, k−1) for a
    right answer and 0 for a wrong one. For k = 1 it is `rloo`. The mean over the group of A_i ∇ log
    π(y_i) is the estimate. A group of fewer than k members has no such set and gives 0. Memory is
    O(batch²). Raises ValueError if k is less than 1. Source: Walder and Karkhanis, "Pass@K Policy
    Optimization" (2025), their "leave one out minus one" form.

    One of three is right. Both pairs of it and another gain by it, 2 · 1; with two right, one pair
    of two does.

    >>> pass_at_k(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 1, 2, 2, 2]), k=2).tolist()
    [2.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    """
    if k < 1:
        raise ValueError(f"pass_at_k: k must be at least 1 (got {k})")
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


def max_rl(
    rewards: Float[Tensor, "batch"], group_id: Int[Tensor, "batch"]
) -> Float[Tensor, "batch"]:
    """A = (R − group mean) / group mean, and 0 where the mean is not above 0: rewards of at least
    0, usually 0 and 1.

    Its gradient averages ∇ log π over the right answers only (less the mean over all, as a
    baseline), which estimates the gradient of −Σ_{k < n} (1 − p)^k / k, the log-likelihood log p of
    a right answer truncated by the group's size n. Right answers to hard prompts count most.
    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026); TRL
    `scale_rewards="mean"`.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([1, 1, 1, 1, 2, 2])).tolist()
    [3.0, -1.0, -1.0, -1.0, 0.0, 0.0]
    """
    group = members(rewards.double(), group_id)
    positive = group.mean > 0
    return (
        torch.where(positive, group.centred / torch.where(positive, group.mean, 1.0), 0.0)
        .to(at_least_float32(rewards).dtype)
        .detach()
    )


def to_tokens(
    advantages: Float[Tensor, "batch"], mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """A sequence's advantage at each of its masked tokens, 0 elsewhere.

    >>> to_tokens(torch.tensor([0.5, -1.0]), torch.tensor([[False, True], [True, True]])).tolist()
    [[0.0, 0.5], [-1.0, -1.0]]
    """
    return torch.where(mask, advantages[:, None], 0.0)


def at_last_token(
    rewards: Float[Tensor, "batch"], mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """A sequence's reward at the last of its masked tokens, 0 elsewhere: the terminal reward that
    `gae` expects.

    >>> at_last_token(torch.tensor([0.5]), torch.tensor([[False, True, True, False]])).tolist()
    [[0.0, 0.0, 0.5, 0.0]]
    """
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (after == 1), rewards[:, None], 0.0)


def whiten(
    values: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, ddof: int = 1
) -> Float[Tensor, "batch seq"]:
    """(V − mean) / (σ + 1e-6) over all masked tokens of the batch, 0 elsewhere; values that are all
    exactly equal give exactly 0.

    σ divides by the count − `ddof`. Whiten the whole step, never a shard of it. Source: verl
    `masked_whiten` (there 1e-8, under the root); NeMo RL's REINFORCE++ is `ddof=0`.

    >>> whiten(torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    exact = torch.where(mask, values.double(), 0.0)
    count = mask.sum()
    centred = torch.where(mask, exact - exact.sum() / count.clamp(min=1), 0.0)
    std = (centred.square().sum() / (count - ddof).clamp(min=1)).sqrt()
    differ = (
        torch.where(mask, exact, torch.inf).amin() < torch.where(mask, exact, -torch.inf).amax()
        if mask.numel()
        else mask.any()
    )
    return (
        torch.where(differ, centred / (std + EPSILON), 0.0)
        .to(at_least_float32(values).dtype)
        .detach()
    )


def reinforce_plus_plus(
    rewards: Float[Tensor, "batch"],
    kl: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    *,
    kl_coef: float,
    group_id: Int[Tensor, "batch"] | None = None,
    kl_to_go: bool = True,
) -> Float[Tensor, "batch seq"]:
    """whiten(R − b − kl_coef · Σ_{s ≥ t} kl_s) over the masked tokens: the return of a per-token
    reward −kl_coef·kl and a terminal reward R, without a critic.

    b = 0, or with `group_id` the mean of the prompt's group ("REINFORCE++-baseline"). `kl` is
    usually `kl(..., estimator="k1")` of π_prev, or k2 with a baseline. `kl_to_go=False` charges a
    token with its own kl only, as NeMo RL does. Source: REINFORCE++; OpenRLHF
    `--advantage_estimator reinforce` and `reinforce_baseline`, NeMo RL
    `adv_estimator.name=reinforce_plus_plus` with `minus_baseline`.

    Returns 1 − 0.5·(2, 1) = (0, 0.5) and −1 − 0 = −1, whitened:

    >>> mask = torch.tensor([[True, True], [False, True]])
    >>> reinforce_plus_plus(torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1.0], [9.0, 0.0]]), mask, kl_coef=0.5)
    tensor([[ 0.2182,  0.8729],
            [ 0.0000, -1.0911]])
    """
    outcome = rewards if group_id is None else advantages(rewards, group_id, scale="none")
    cost = torch.where(mask, at_least_float32(kl), 0.0)
    if kl_to_go:
        cost = cost.flip(-1).cumsum(-1).flip(-1)
    return whiten(at_least_float32(outcome)[:, None] - kl_coef * cost, mask)


def _scan_back(values: Tensor, decay: Tensor) -> Tensor:
    """x_t = values_t + decay_t · x_{t+1} along the last axis, by doubling: log2(seq) passes over
    the whole array instead of seq small steps.
    """
    step = 1
    while step < values.shape[-1]:
        values = values + decay * pad(values[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return values


def gae(
    rewards: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, "batch"] = 0.95,
    value_lam: float | Float[Tensor, "batch"] | None = None,
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"]]:
    """Generalised advantage estimation: (advantages, returns), both 0 off the mask.

    δ_t = r_t + γ V_next − V_t and A_t = δ_t + γλ A_next, where "next" is the sequence's next
    *masked* token: tool output and observations are stepped over, as if they were not there, and
    neither their rewards nor their values are read. After the last one both are 0. values[:, t] is
    the value before token t; put the reward of the whole on the last token (`at_last_token`).
    returns = A + V, with A of `value_lam` where that is given (VAPO: policy 0.95 or
    `length_adaptive_lambda`, value 1). λ may be one number per row. Source: Schulman et al. (2016);
    verl `adv_estimator=gae`, NeMo RL `gae_lambda`, `gae_lambda_policy`, `gae_lambda_value`.

    γ = λ = ½ and the middle token is an observation: δ_2 = 1 − 0.5, so A_2 = 0.5; δ_0 = 0 + ½·0.5 −
    0.25 = 0, so A_0 = 0 + ¼·0.5.

    >>> mask = torch.tensor([[True, False, True]])
    >>> gae(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.25, 9.0, 0.5]]), mask, gamma=0.5, lam=0.5)
    (tensor([[0.1250, 0.0000, 0.5000]]), tensor([[0.3750, 0.0000, 1.0000]]))
    """
    values, rewards = (
        torch.where(mask, at_least_float32(x.detach()), 0.0) for x in (values, rewards)
    )
    carried = _scan_back(
        values, (~mask).to(values.dtype)
    )  # the value of this token, or of the next masked one
    delta = torch.where(mask, rewards + gamma * pad(carried[:, 1:], (0, 1)) - values, 0.0)

    def discounted(lam: float | Tensor) -> Tensor:
        decay = gamma * (lam[:, None].to(values.dtype) if isinstance(lam, Tensor) else lam)
        return torch.where(
            mask, _scan_back(delta, torch.where(mask, decay, torch.ones_like(values))), 0.0
        )

    policy = discounted(lam)
    return policy, values + (policy if value_lam is None else discounted(value_lam))


def length_adaptive_lambda(
    lengths: Int[Tensor, "batch"], *, alpha: float = 0.05
) -> Float[Tensor, "batch"]:
    """λ = 1 − 1/(alpha · length), at least 0: a `lam` for `gae` under which reward reaches back
    over a share of the answer that does not shrink with its length.

    `lengths` in response tokens. Raises ValueError unless alpha is above 0. Source: VAPO, alpha =
    0.05; NeMo RL `length_adaptive_alpha`.

    >>> length_adaptive_lambda(torch.tensor([10, 40, 200])).tolist()
    [0.0, 0.5, 0.8999999761581421]
    """
    if not alpha > 0:
        raise ValueError(
            f"length_adaptive_lambda: alpha must be above 0 (got {alpha}); VAPO uses 0.05"
        )
    return (1 - 1 / (alpha * lengths.clamp(min=1).float())).clamp(min=0)


def opd(
    teacher_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq"]:
    """On-policy distillation: A_t = sg(log π_teacher − log π_prev) at the masked tokens, 0
    elsewhere; its policy gradient lowers KL(π‖π_teacher).

    Source: "On-Policy Distillation" (Thinking Machines, 2025); NeMo RL `adv_estimator.name=opd`.

    >>> opd(torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -3.0]]), torch.tensor([[False, True]])).tolist()
    [[0.0, 2.0]]
    """
    teacher, prev = (
        torch.where(mask, at_least_float32(x.detach()), 0.0)
        for x in (teacher_logprobs, prev_logprobs)
    )
    return teacher - prev

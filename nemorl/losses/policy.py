"""Policy-gradient losses (docs/numerics.md, Policy losses): each is Σ_t w_t · v_t · ℓ_t.

log r = log π − log π_prev, sg = stop-gradient. r is bounded at e²⁰ (`types.bounded_exp`), so that
the gradient and its norm are finite however far π has moved, and 0 for a clipped or dropped token.

Arguments that all losses here share:
    token_logprobs: log π, the only argument that gets a gradient.
    prev_logprobs: log π_prev.
    advantages: A.
    loss_weights: w, built once for the optimizer step; 0 = not trained.
    importance_weights: v from `importance_weights`; None = 1 everywhere.
    segment_ids: 0 = padding, 1.. = the sequences of a row; None = one sequence a row.

Metrics over the trained tokens (w ≠ 0): `ratio_mean`, `ratio_min`, `ratio_max`; `approx_kl_k1` =
mean −log r and `approx_kl_k3` = mean (r − 1 − log r), two estimates of KL(π_prev‖π) in nats; with
importance weights `importance_weight_mean`, `importance_weight_max` and `masked_fraction` (share
with v = 0).
"""

from typing import Any

import torch

from nemorl.checks import at_least, require
from nemorl.losses.kl import kl
from nemorl.losses.types import (
    MAX_LOG_RATIO,
    LossOutput,
    Metrics,
    PerToken,
    TokenIds,
    TokenMask,
    at_least_float32,
    bounded_exp,
    masked,
    max_of,
    mean_of,
    min_of,
    require_all,
    segment_mean,
    share_of,
    weighted_sum,
)


def on_policy(token_logprobs: PerToken) -> PerToken:
    """Return sg π, to pass as `prev_logprobs` for one update per rollout batch: the ratio is 1.

    Source: NeMo RL `force_on_policy_ratio`.

    >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> weights = torch.tensor([[0.5, 0.5]])
    >>> output = clipped(logprobs, on_policy(logprobs), torch.tensor([[1.0, -1.0]]), weights)
    >>> torch.autograd.grad(output.loss, logprobs)[0]
    tensor([[-0.5000,  0.5000]])
    """
    return token_logprobs.detach()


def clipped(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    importance_weights: PerToken | None = None,
    *,
    clip_low: float | PerToken = 0.2,
    clip_high: float | PerToken = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """Return the clipped surrogate loss of PPO and GRPO.

    ℓ = max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)); with dual_clip = c, where A < 0,
    ℓ = min(that, −A·c). Both clips may be given for each token.

    Metrics: the module's; `clip_fraction_low` (A < 0 and r below), `clip_fraction_high` (A > 0 and
    r above), with dual_clip `clip_fraction_dual` (A < 0 and r > c).
    Raises: ValueError unless clip_low ≥ 0, clip_high ≥ 0 and dual_clip > 1.
    Source: Schulman et al. 2017; DAPO: clip_high=0.28; dual clip: Ye et al. 2020, verl
    `clip_ratio_c` = 3, NeMo RL `ratio_clip_c` (`ratio_clip_min/max` are clip_low/high).

    >>> prev = torch.tensor([[0.5, 0.5, 0.5]]).log()
    >>> now = torch.tensor([[0.75, 0.25, 0.55]]).log()  # ratios 1.5, 0.5, 1.1
    >>> output = clipped(now, prev, torch.tensor([[1.0, -1.0, 2.0]]), torch.ones(1, 3))
    >>> round(output.loss.item(), 4)  # -1.2 + 0.8 - 2.2
    -2.6
    """
    _check_clips(clip_low, clip_high)
    require(
        dual_clip is None or dual_clip > 1, "dual_clip", "must be above 1", dual_clip, "3 is usual"
    )
    mask = loss_weights != 0
    A = masked(mask, advantages.detach())
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    ratio = bounded_exp(log_ratio)
    low: Any = 1 - clip_low
    high: Any = 1 + clip_high
    losses = torch.maximum(-A * ratio, -A * ratio.clamp(low, high))
    fractions = {
        "clip_fraction_low": (A < 0) & (ratio < low),
        "clip_fraction_high": (A > 0) & (ratio > high),
    }
    if dual_clip is not None:
        losses = torch.where(A < 0, torch.minimum(losses, -A * dual_clip), losses)
        fractions["clip_fraction_dual"] = (A < 0) & (ratio > dual_clip)
    return _output(losses, loss_weights, importance_weights, ratio, log_ratio, **fractions)


def gspo(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    segment_ids: TokenIds | None = None,
    importance_weights: PerToken | None = None,
    *,
    clip_low: float | PerToken = 3e-4,
    clip_high: float | PerToken = 4e-4,
    dual_clip: float | None = None,
    token_gradient: bool = False,
) -> LossOutput:
    """Return the loss of group sequence policy optimization: `clipped` of the sequences' ratios.

    Every token's r is replaced by s = exp(mean of log r over its sequence's trained tokens). A
    sequence must not be cut between two calls. The paper's objective has `sequence_mean_weights`.
    token_gradient: GSPO-token, the same value with a gradient of each token, s_t = sg(s) · π/sg(π),
    for advantages that differ inside a sequence.

    Metrics: as `clipped`; ratio and clip fractions are of s, per token. Raises: as `clipped`.
    Source: Zheng et al. 2025 (clip 3e-4 / 4e-4, the defaults) and its section 4.3; TRL
    `importance_sampling_level="sequence"`, NeMo RL `sequence_level_importance_ratios`; GSPO-token:
    verl `loss_mode="gspo"`, ms-swift `importance_sampling_level="sequence_token"`.

    >>> prev = torch.tensor([[0.5, 0.5, 0.1]]).log()
    >>> now = torch.tensor([[0.605, 0.5, 0.9]]).log()  # s = sqrt(1.21 · 1); the third isn't trained
    >>> weights = torch.tensor([[0.5, 0.5, 0.0]])
    >>> output = gspo(now, prev, torch.ones(1, 3), weights, clip_low=0.2, clip_high=0.2)
    >>> round(output.loss.item(), 4)
    -1.1
    """
    mask = loss_weights != 0
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    log_s = masked(mask, segment_mean(log_ratio, mask, segment_ids))
    if token_gradient:
        log_s = log_s.detach() + _zero_with_gradient(token_logprobs, mask)
    output = clipped(
        log_s,
        torch.zeros_like(log_s),
        advantages,
        loss_weights,
        importance_weights,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return LossOutput(output.loss, {**output.metrics, **_kl_metrics(log_ratio, mask)})


def cispo(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    importance_weights: PerToken | None = None,
    *,
    clip_low: float | PerToken | None = None,
    clip_high: float | PerToken = 4.0,
) -> LossOutput:
    """Return the loss with clipped importance weights, which bounds gradients and drops none.

    ℓ = −A · sg(clip(r, 1 − clip_low, 1 + clip_high)) · log π; clip_low=None: no lower bound.

    Metrics: the module's; `clip_fraction_low`, `clip_fraction_high` (r outside, for any A).
    Raises: ValueError unless clip_low ≥ 0 (or None) and clip_high ≥ 0.
    Source: MiniMax-M1 (2025), which bounds from above only; ScaleRL's truncation at 5 = TRL
    `loss_type="cispo", epsilon_high=5` = clip_high=4. verl `loss_mode="cispo"` (`clip_ratio_low`,
    `clip_ratio_high`) and NeMo RL `use_cispo` (`ratio_clip_min`, `ratio_clip_max`).

    >>> prev = torch.tensor([[0.1, 0.5]]).log()
    >>> now = torch.tensor([[0.8, 0.25]]).log().requires_grad_()  # ratios 8, 0.5
    >>> output = cispo(now, prev, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2))
    >>> torch.autograd.grad(output.loss, now)[0]
    tensor([[-5.0000,  0.5000]])
    """
    _check_clips(clip_low, clip_high)
    mask = loss_weights != 0
    A = masked(mask, advantages.detach())
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    ratio = bounded_exp(log_ratio.detach())
    low: Any = 0.0 if clip_low is None else 1 - clip_low
    high: Any = 1 + clip_high
    losses = -A * ratio.clamp(low, high) * masked(mask, token_logprobs)
    return _output(
        losses,
        loss_weights,
        importance_weights,
        ratio,
        log_ratio,
        clip_fraction_low=ratio < low,
        clip_fraction_high=ratio > high,
    )


def sapo(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    importance_weights: PerToken | None = None,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> LossOutput:
    """Return the loss of soft adaptive policy optimization, whose gradient fades as r leaves 1.

    ℓ = −A · σ(τ(r − 1)) · 4/τ, τ = temperature_positive where A > 0, else temperature_negative.

    Raises: ValueError for a temperature below 0.001.
    Source: Gao et al. 2025 (the defaults); TRL `loss_type="sapo"`, verl `loss_mode="sapo"`.

    >>> prev, now = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()  # ratio 2
    >>> output = sapo(now, prev, torch.ones(1, 1), torch.ones(1, 1))
    >>> round(output.loss.item(), 4)  # -4 σ(1)
    -2.9242
    """
    at_least(1e-3, temperature_positive=temperature_positive)
    at_least(1e-3, temperature_negative=temperature_negative)
    mask = loss_weights != 0
    A = masked(mask, advantages.detach())
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    ratio = bounded_exp(log_ratio)
    tau = torch.where(A > 0, temperature_positive, temperature_negative)
    losses = -A * (tau * (ratio - 1)).sigmoid() * 4 / tau
    return _output(losses, loss_weights, importance_weights, ratio, log_ratio)


def gmpo(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    segment_ids: TokenIds | None = None,
    importance_weights: PerToken | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossOutput:
    """Return the loss of geometric-mean policy optimization: ℓ = −A·s.

    s = exp(mean over the sequence's trained tokens of min(log r, clip_high) where A > 0, else of
    max(log r, −clip_low)). A sequence has one A; else as `gspo`.

    Metrics: as `clipped`, of log r; ratios are s. Raises: ValueError for clips below 0.
    Source: Zhao et al. 2025 (the defaults); verl `loss_mode="geo_mean"`, TRL `experimental.gmpo`.

    >>> prev, now = torch.tensor([[-2.0, -2.0]]), torch.tensor([[-1.0, -2.2]])
    >>> output = gmpo(now, prev, torch.ones(1, 2), torch.tensor([[0.5, 0.5]]))
    >>> round(output.loss.item(), 4)  # -exp((0.4 - 0.2) / 2)
    -1.1052
    """
    at_least(0, clip_low=clip_low, clip_high=clip_high)
    mask = loss_weights != 0
    A = masked(mask, advantages.detach())
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    clipped_log = torch.where(A > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    s = bounded_exp(masked(mask, segment_mean(clipped_log, mask, segment_ids)))
    return _output(
        -A * s,
        loss_weights,
        importance_weights,
        s,
        log_ratio,
        clip_fraction_low=(A < 0) & (log_ratio < -clip_low),
        clip_fraction_high=(A > 0) & (log_ratio > clip_high),
    )


def reinforce(
    token_logprobs: PerToken,
    prev_logprobs: PerToken,
    advantages: PerToken,
    loss_weights: PerToken,
    importance_weights: PerToken | None = None,
) -> LossOutput:
    """Return the plain policy-gradient loss: its gradient is the gradient of −A·log π.

    Its value is −A·sg(r), to compare with the other losses.
    Source: Williams 1992; NeMo RL `disable_ppo_ratio`.

    >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> advantages, weights = torch.tensor([[1.0, -3.0]]), torch.tensor([[0.5, 0.5]])
    >>> output = reinforce(logprobs, on_policy(logprobs), advantages, weights)
    >>> output.loss.item(), torch.autograd.grad(output.loss, logprobs)[0]
    (1.0, tensor([[-0.5000,  1.5000]]))
    """
    mask = loss_weights != 0
    A = masked(mask, advantages.detach())
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, mask)
    ratio = bounded_exp(log_ratio.detach())
    losses = -A * (ratio + _zero_with_gradient(token_logprobs, mask))
    return _output(losses, loss_weights, importance_weights, ratio, log_ratio)


def _check_clips(low: float | PerToken | None, high: float | PerToken) -> None:
    for name, value in (("clip_low", low), ("clip_high", high)):
        if isinstance(value, torch.Tensor):
            require_all(value >= 0, f"{name} must be at least 0 at each token")
        else:
            at_least(0, **{name: value})


def _log_ratio(token_logprobs: PerToken, prev_logprobs: PerToken, mask: TokenMask) -> PerToken:
    return masked(mask, token_logprobs) - masked(mask, prev_logprobs.detach())


def _zero_with_gradient(token_logprobs: PerToken, mask: TokenMask) -> PerToken:
    """Exactly 0, with the gradient of log π."""
    logprobs = masked(mask, token_logprobs)
    return logprobs - logprobs.detach()


def _kl_metrics(log_ratio: PerToken, mask: TokenMask) -> Metrics:
    log_ratio = log_ratio.detach()
    k3 = log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - log_ratio
    return {"approx_kl_k1": mean_of(-log_ratio, mask), "approx_kl_k3": mean_of(k3, mask)}


def _output(
    losses: PerToken,
    loss_weights: PerToken,
    importance_weights: PerToken | None,
    ratio: PerToken,
    log_ratio: PerToken,
    **fractions: TokenMask,
) -> LossOutput:
    mask, weights = loss_weights != 0, at_least_float32(loss_weights)
    metrics = {
        "ratio_mean": mean_of(ratio, mask),
        "ratio_min": min_of(ratio, mask),
        "ratio_max": max_of(ratio, mask),
        **_kl_metrics(log_ratio, mask),
        **{name: share_of(condition, mask) for name, condition in fractions.items()},
    }
    if importance_weights is not None:
        importance = masked(mask, importance_weights.detach())
        # A dropped token (v = 0) is cut off before the product: its loss may be infinite.
        weights, losses = weights * importance, torch.where(importance != 0, losses, 0.0)
        metrics |= {
            "importance_weight_mean": mean_of(importance, mask),
            "importance_weight_max": max_of(importance, mask),
            "masked_fraction": share_of(importance == 0, mask),
        }
    return LossOutput((weights * losses).sum(), metrics)


def kl_loss(
    token_logprobs: PerToken,
    reference_logprobs: PerToken,
    loss_weights: PerToken,
    generation_logprobs: PerToken | None = None,
    *,
    coef: float,
    estimator: str = "k3",
    gradient: str = "pathwise",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> LossOutput:
    """Return coef · Σ w · KL(π‖π_ref), estimated per token by `kl` with the other options.

    Metric: `kl`, the mean in nats; coef=0 reports it and trains nothing.
    Source: NeMo RL `reference_policy_kl_penalty`, TRL `beta`, verl `kl_loss_coef`.

    >>> policy, reference = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> output = kl_loss(policy, reference, torch.ones(1, 1), coef=0.1)
    >>> round(output.loss.item(), 4)  # 0.1 · (0.5 - 1 + log 2)
    0.0193
    """
    mask = loss_weights != 0
    values = kl(
        token_logprobs,
        reference_logprobs,
        mask,
        estimator=estimator,
        gradient=gradient,
        generation_logprobs=generation_logprobs,
        input_clamp=input_clamp,
        output_clamp=output_clamp,
    )
    return LossOutput(coef * weighted_sum(loss_weights, values), {"kl": mean_of(values, mask)})


def entropy_bonus(entropy: PerToken, loss_weights: PerToken, *, coef: float) -> LossOutput:
    """Return −coef · Σ w · H: a positive `coef` keeps the policy random.

    Metric: `entropy`, the mean in nats; coef=0 reports it and trains nothing.
    Source: Mnih et al. 2016; verl `entropy_coeff`.

    >>> entropy_bonus(torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5, 0.5]]), coef=0.1).loss
    tensor(-0.3000)
    """
    return LossOutput(
        -coef * weighted_sum(loss_weights, entropy),
        {"entropy": mean_of(entropy, loss_weights != 0)},
    )


def log_ratio_penalty(
    token_logprobs: PerToken, generation_logprobs: PerToken, loss_weights: PerToken, *, coef: float
) -> LossOutput:
    """Return coef · Σ w · (log π − log π_gen)²: a penalty for leaving the policy that sampled.

    A token whose sampler logprob is not finite has none.

    Metric: `log_ratio_squared`, the mean in nats²; coef=0 reports it and trains nothing.
    Source: prime-rl `kl_tau` (0.001), after Kimi K2.5 (2026).

    >>> now, generation = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> output = log_ratio_penalty(now, generation, torch.ones(1, 2), coef=0.1)
    >>> round(output.loss.item(), 4)  # 0.1 · (log 2)²
    0.048
    """
    usable = (loss_weights != 0) & generation_logprobs.isfinite()
    gap = masked(usable, token_logprobs) - masked(usable, generation_logprobs.detach())
    return LossOutput(
        coef * weighted_sum(loss_weights, gap**2), {"log_ratio_squared": mean_of(gap**2, usable)}
    )


def positive_nll(
    token_logprobs: PerToken, positive: TokenMask, loss_weights: PerToken, *, coef: float = 0.1
) -> LossOutput:
    """Return −coef · Σ_{t positive} w · log π: imitation of rewarded sequences.

    `positive` is True on their tokens. VAPO's mean over them is
    `loss_weights=token_mean_weights(loss_mask & positive)`.

    Metrics: `positive_nll` (mean over the positive tokens), `positive_fraction`.
    Source: VAPO (2025), 0.1; NeMo RL `positive_example_nll_weight` (there a mean over each
    microbatch's positive tokens).

    >>> logprobs, positive = torch.tensor([[-2.0, -3.0]]), torch.tensor([[True, False]])
    >>> positive_nll(logprobs, positive, torch.tensor([[0.5, 0.5]]), coef=0.1).loss
    tensor(0.1000)
    """
    mask = loss_weights != 0
    kept = mask & positive
    losses = -masked(kept, token_logprobs)
    metrics = {"positive_nll": mean_of(losses, kept), "positive_fraction": share_of(positive, mask)}
    return LossOutput(coef * weighted_sum(loss_weights, torch.where(kept, losses, 0.0)), metrics)

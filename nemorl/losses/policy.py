"""Policy-gradient losses (docs/numerics.md, Policy losses). Each is Σ_t w_t · v_t · ℓ_t over the tokens it is given; w are
`loss_weights`, v the optional `importance_weights`.

Notation: A = advantage, ℓr = log π − log π_prev, r = exp ℓr, sg = stop-gradient. π_prev, A and v
are constants: no gradient goes into them. r is bounded at e⁸⁰, which float32 holds, so that a
clipped or dropped token has gradient 0 and not NaN however far π has moved (verl: ℓr in ±20).

All of them report over the trained tokens (`loss_weights` ≠ 0): `ratio_mean`, `ratio_min`,
`ratio_max`; `approx_kl_k1` = mean −ℓr and `approx_kl_k3` = mean (r − 1 − ℓr), two estimates of
KL(π_prev‖π) in nats; and with importance weights `importance_weight_mean`, `importance_weight_max`,
`masked_fraction` (share with weight 0).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.losses.masked import masked, max_of, mean_of, min_of, share_of
from nemorl.losses.segments import at_least_float32, segment_mean
from nemorl.losses.types import LossOutput, Metrics

MAX_LOG_RATIO = 80.0


def on_policy(token_logprobs: Float[Tensor, "batch seq"]) -> Float[Tensor, "batch seq"]:
    """π_prev := sg π, to pass as `prev_logprobs`: the ratio is 1 and has the right gradient. Right
    for one update per rollout batch, not for more.

    Source: NeMo RL `force_on_policy_ratio`.

    >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> weights = torch.tensor([[0.5, 0.5]])
    >>> output = clipped(logprobs, on_policy(logprobs), torch.tensor([[1.0, -1.0]]), weights)
    >>> torch.autograd.grad(output.loss, logprobs)[0]
    tensor([[-0.5000,  0.5000]])
    """
    return token_logprobs.detach()


def clipped(
    token_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    importance_weights: Float[Tensor, "batch seq"] | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """The clipped surrogate of PPO and GRPO: ℓ = max(−A·r, −A·clip(r, 1 − clip_low, 1 +
    clip_high)).

    `dual_clip` = c > 1: where A < 0, ℓ = min(that, −A·c), so that one runaway ratio can't dominate
    a step. Metrics besides the module's: `clip_fraction_low` (A < 0 and r below),
    `clip_fraction_high` (A > 0 and r above), with dual clip `clip_fraction_dual` (A < 0 and r > c).
    Raises: ValueError unless clip_low ≥ 0, clip_high ≥ 0 and dual_clip > 1. Source: Schulman et al.
    2017; "clip-higher" of DAPO: clip_high=0.28; dual clip: Ye et al. 2020 (verl `clip_ratio_c` = 3,
    NeMo RL `ratio_clip_c`, whose `ratio_clip_min/max` are our clip_low/high).

    >>> prev = torch.tensor([[0.5, 0.5, 0.5]]).log()
    >>> now = torch.tensor([[0.75, 0.25, 0.55]]).log()  # ratios 1.5, 0.5, 1.1
    >>> output = clipped(now, prev, torch.tensor([[1.0, -1.0, 2.0]]), torch.ones(1, 3))
    >>> round(output.loss.item(), 4)  # -1.2 + 0.8 - 2.2
    -2.6
    """
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, loss_weights)
    return _clipped(
        log_ratio,
        log_ratio,
        advantages,
        loss_weights,
        importance_weights,
        clip_low,
        clip_high,
        dual_clip,
    )


def gspo(
    token_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    segment_ids: Int[Tensor, "batch seq"] | None = None,
    importance_weights: Float[Tensor, "batch seq"] | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> LossOutput:
    """Group sequence policy optimisation: `clipped` with every token's ratio replaced by its
    sequence's, s = exp(mean of ℓr over the sequence's trained tokens).

    By `segment_ids` (0 = padding, 1.. = the sequences of a row; None: a row is one sequence), so
    packing does not matter. A sequence must not be cut between two calls. The paper's objective is
    the one with `sequence_mean_weights`. Metrics: as `clipped`; the ratio and the clip fractions
    are of s, per token. Raises: as `clipped`. Source: Zheng et al. 2025 (clip 3e-4 / 4e-4, the
    defaults here); TRL `importance_sampling_level="sequence"`, NeMo RL
    `sequence_level_importance_ratios`.

    >>> prev = torch.tensor([[0.5, 0.5, 0.1]]).log()
    >>> now = torch.tensor([[0.605, 0.5, 0.9]]).log()  # s = sqrt(1.21 · 1) = 1.1; the third token isn't trained
    >>> output = gspo(now, prev, torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[0.5, 0.5, 0.0]]), clip_low=0.2, clip_high=0.2)
    >>> round(output.loss.item(), 4)
    -1.1
    """
    mask = loss_weights != 0
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, loss_weights)
    sequence_log_ratio = masked(mask, segment_mean(log_ratio, mask, segment_ids))
    return _clipped(
        sequence_log_ratio,
        log_ratio,
        advantages,
        loss_weights,
        importance_weights,
        clip_low,
        clip_high,
        dual_clip,
    )


def gspo_token(
    token_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    segment_ids: Int[Tensor, "batch seq"] | None = None,
    importance_weights: Float[Tensor, "batch seq"] | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> LossOutput:
    """GSPO-token: the value of `gspo`, but each token has its own gradient: s_t = sg(s) · π/sg(π).

    Where a sequence has one advantage and one weight, its gradient is `gspo`'s; it is for
    advantages that differ inside a sequence. Raises and metrics: as `gspo`. Source: Zheng et al.
    2025, section 4.3; ms-swift `importance_sampling_level="sequence_token"`; verl
    `loss_mode="gspo"` is this one.

    >>> prev = torch.tensor([[0.5, 0.5]]).log()
    >>> now = torch.tensor([[0.605, 0.5]]).log().requires_grad_()  # s = 1.1
    >>> output = gspo_token(now, prev, torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.5]]), clip_low=0.2, clip_high=0.2)
    >>> torch.autograd.grad(output.loss, now)[0]
    tensor([[-0.5500, -1.1000]])
    """
    mask = loss_weights != 0
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, loss_weights)
    sequence_log_ratio = masked(
        mask, segment_mean(log_ratio.detach(), mask, segment_ids)
    ) + _gradient_carrier(token_logprobs, loss_weights)
    return _clipped(
        sequence_log_ratio,
        log_ratio,
        advantages,
        loss_weights,
        importance_weights,
        clip_low,
        clip_high,
        dual_clip,
    )


def cispo(
    token_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    importance_weights: Float[Tensor, "batch seq"] | None = None,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
) -> LossOutput:
    """Clipped importance weights: ℓ = −A · sg(clip(r, 1 − clip_low, 1 + clip_high)) · log π. No
    token's gradient is ever cut off, only bounded.

    `clip_low=None`: no lower bound. Metrics besides the module's: `clip_fraction_low`,
    `clip_fraction_high` (r outside, whatever the advantage). Raises: ValueError unless clip_low ≥ 0
    (or None) and clip_high ≥ 0. Source: MiniMax-M1 (2025), which bounds from above only; ScaleRL's
    truncation at 5 = TRL `loss_type="cispo", epsilon_high=5` = our clip_high=4 (the default; their
    bound is absolute, ours is over 1). verl `loss_mode="cispo"` (`clip_ratio_low`,
    `clip_ratio_high`) and NeMo RL `use_cispo` (`ratio_clip_min`, `ratio_clip_max`) are clip_low,
    clip_high.

    >>> prev, now = torch.tensor([[0.1, 0.5]]).log(), torch.tensor([[0.8, 0.25]]).log().requires_grad_()  # ratios 8, 0.5
    >>> output = cispo(now, prev, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2))
    >>> torch.autograd.grad(output.loss, now)[0]
    tensor([[-5.0000,  0.5000]])
    """
    _require_clip(clip_low or 0.0, clip_high, None)
    mask = loss_weights != 0
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, loss_weights)
    ratio = _exp(log_ratio.detach())
    low, high = 0.0 if clip_low is None else 1 - clip_low, 1 + clip_high
    losses = (
        -masked(mask, advantages.detach()) * ratio.clamp(low, high) * masked(mask, token_logprobs)
    )
    metrics = {
        **_ratio_metrics(log_ratio, log_ratio, loss_weights),
        "clip_fraction_low": share_of(ratio < low, mask),
        "clip_fraction_high": share_of(ratio > high, mask),
    }
    return _output(losses, loss_weights, importance_weights, metrics)


def reinforce(
    token_logprobs: Float[Tensor, "batch seq"],
    prev_logprobs: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    loss_weights: Float[Tensor, "batch seq"],
    importance_weights: Float[Tensor, "batch seq"] | None = None,
) -> LossOutput:
    """The plain policy gradient: the gradient is that of −A·log π; the value reported is −A·sg(r),
    so that it can be compared with the other losses.

    π_prev enters the value and the metrics only, never the gradient. Source: Williams 1992; NeMo RL
    `disable_ppo_ratio`.

    >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> output = reinforce(logprobs, on_policy(logprobs), torch.tensor([[1.0, -3.0]]), torch.tensor([[0.5, 0.5]]))
    >>> output.loss.item(), torch.autograd.grad(output.loss, logprobs)[0]
    (1.0, tensor([[-0.5000,  1.5000]]))
    """
    mask = loss_weights != 0
    log_ratio = _log_ratio(token_logprobs, prev_logprobs, loss_weights)
    losses = -masked(mask, advantages.detach()) * (
        _exp(log_ratio.detach()) + _gradient_carrier(token_logprobs, loss_weights)
    )
    return _output(
        losses, loss_weights, importance_weights, _ratio_metrics(log_ratio, log_ratio, loss_weights)
    )


def _log_ratio(token_logprobs: Tensor, prev_logprobs: Tensor, loss_weights: Tensor) -> Tensor:
    mask = loss_weights != 0
    return masked(mask, token_logprobs) - masked(mask, prev_logprobs.detach())


def _gradient_carrier(token_logprobs: Tensor, loss_weights: Tensor) -> Tensor:
    """Exactly 0, with the gradient of log π."""
    logprobs = masked(loss_weights != 0, token_logprobs)
    return logprobs - logprobs.detach()


def _exp(log_ratio: Tensor) -> Tensor:
    """The ratio, held below float32's infinity: 0 · inf, in a loss (A = 0) or in the gradient of a
    clipped or dropped token, would be NaN.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _clipped(
    log_ratio: Tensor,
    token_log_ratio: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    importance_weights: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossOutput:
    """The clipped surrogate of exp(log_ratio); the KL metrics are of the tokens' own ratios."""
    _require_clip(clip_low, clip_high, dual_clip)
    mask = loss_weights != 0
    advantages, ratio = masked(mask, advantages.detach()), _exp(log_ratio)
    negative = advantages < 0
    losses = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    )
    metrics = {
        **_ratio_metrics(log_ratio, token_log_ratio, loss_weights),
        "clip_fraction_low": share_of(negative & (ratio < 1 - clip_low), mask),
        "clip_fraction_high": share_of((advantages > 0) & (ratio > 1 + clip_high), mask),
    }
    if dual_clip is not None:
        losses = torch.where(negative, torch.minimum(losses, -advantages * dual_clip), losses)
        metrics["clip_fraction_dual"] = share_of(negative & (ratio > dual_clip), mask)
    return _output(losses, loss_weights, importance_weights, metrics)


def _require_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if value < 0:
            raise ValueError(
                f"{name} must be >= 0, but it is {value}. The ratio is clipped to [1 - clip_low, 1"
                " + clip_high]: 0.2 means 0.8 or 1.2."
            )
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip must be > 1, but it is {dual_clip}. It bounds the ratio where the advantage"
            " is negative: 3 is usual, None is off."
        )


def _ratio_metrics(log_ratio: Tensor, token_log_ratio: Tensor, loss_weights: Tensor) -> Metrics:
    mask, token_log_ratio = loss_weights != 0, token_log_ratio.detach()
    ratio = _exp(log_ratio.detach())
    return {
        "ratio_mean": mean_of(ratio, mask),
        "ratio_min": min_of(ratio, mask),
        "ratio_max": max_of(ratio, mask),
        "approx_kl_k1": mean_of(-token_log_ratio, mask),
        "approx_kl_k3": mean_of(
            token_log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - token_log_ratio, mask
        ),
    }


def _output(
    losses: Tensor, loss_weights: Tensor, importance_weights: Tensor | None, metrics: Metrics
) -> LossOutput:
    mask, weights = loss_weights != 0, at_least_float32(loss_weights)
    if importance_weights is None:
        return LossOutput((weights * losses).sum(), metrics)
    importance = masked(mask, importance_weights.detach())
    # A dropped token (weight 0) is cut off before the product: its loss may be infinite.
    losses = torch.where(importance != 0, losses, 0.0)
    metrics = {
        **metrics,
        "importance_weight_mean": mean_of(importance, mask),
        "importance_weight_max": max_of(importance, mask),
        "masked_fraction": share_of(importance == 0, mask),
    }
    return LossOutput((weights * importance * losses).sum(), metrics)

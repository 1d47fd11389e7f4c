"""Off-policy correction w = π_prev/π_gen, and how far the sampler is from the trainer."""

import torch

from nemorl.checks import require
from nemorl.losses.masked import (
    MAX_LOG_RATIO,
    bounded_exp,
    masked,
    max_of,
    mean_of,
    min_of,
    require_one_of,
    share_of,
)
from nemorl.losses.segments import segment_mean, segment_sum
from nemorl.losses.types import Metrics, PerToken, TokenIds, TokenMask

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "sequence_mask")


def importance_weights(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    segment_ids: TokenIds | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    min: float = 0.0,
    max: float = 2.0,
) -> tuple[PerToken, Metrics]:
    """Return w = π_prev/π_gen [batch, seq], by which a token's loss is multiplied, and its metrics.

    With d_t = log π_prev − log π_gen over a sequence's trained tokens, w_t = exp d_t
    (level="token"), exp Σ d_t ("sequence") or exp mean d_t ("geometric"). Outside [min, max] w is
    clamped (mode="truncate") or 0 ("mask"); with "sequence_mask" it is 0 in every sequence whose
    *geometric* ratio is outside, and other sequences keep their w, however large. Ratios are
    bounded at e²⁰ (`masked.bounded_exp`), which a long sequence's product soon exceeds.

    A trained token whose sampler logprob is not finite has w = 0 and no part in its sequence's
    ratio. A NaN in prev_logprobs is passed on. Weights are constants, 0 off the mask; dropped
    tokens still count in the denominators of `loss_weights`. `segment_ids`: 0 = padding, 1.. = the
    sequences of a row; None = one sequence a row.

    Metrics: `importance_ratio_mean/min/max` (before `mode`); shares of the trained tokens:
    `importance_outside_fraction`, `generation_nonfinite_fraction`.
    Raises: ValueError for an unknown level or mode, or unless 0 ≤ min ≤ max.
    Source: TIS (Yao et al. 2025) = token + truncate, max 2; verl
    `rollout_correction.rollout_is=token|sequence`, `rollout_is_threshold` = max. IcePop (Ling team
    2025) = token + mask, 0.5 and 5. NeMo RL `truncated_importance_sampling_type` and OpenRLHF
    `vllm_is_correction_type`: tis, icepop, and seq-mask-tis = token + sequence_mask. TRL
    `vllm_importance_sampling_mode="sequence_mask"` is sequence + mask, min 0.

    >>> prev = torch.tensor([[0.5, 0.3, 0.4]]).log()
    >>> generation, mask = torch.tensor([[0.5, 0.1, 0.8]]).log(), torch.tensor([[True, True, True]])
    >>> importance_weights(prev, generation, mask, max=2.0)[0]
    tensor([[1.0000, 2.0000, 0.5000]])
    >>> importance_weights(prev, generation, mask, level="sequence")[0]
    tensor([[1.5000, 1.5000, 1.5000]])
    """
    require_one_of("level", level, LEVELS)
    require_one_of("mode", mode, MODES)
    require(0 <= min <= max, "(min, max)", "must be 0 <= min <= max", (min, max), "1 = on policy")
    usable = loss_mask & generation_logprobs.isfinite()
    log_weight = masked(usable, prev_logprobs.detach()) - masked(
        usable, generation_logprobs.detach()
    )
    total = segment_sum(log_weight, segment_ids)
    geometric = total / segment_sum(usable, segment_ids).clamp(min=1)
    logs = {"token": log_weight, "sequence": total, "geometric": geometric}
    weight = bounded_exp(logs[level])

    judged = bounded_exp(geometric) if mode == "sequence_mask" else weight
    outside = (judged < min) | (judged > max)
    bounded = weight.clamp(min, max) if mode == "truncate" else torch.where(outside, 0.0, weight)
    metrics: Metrics = {
        "importance_ratio_mean": mean_of(weight, usable),
        "importance_ratio_min": min_of(weight, usable),
        "importance_ratio_max": max_of(weight, usable),
        "importance_outside_fraction": share_of(outside & usable, loss_mask),
        "generation_nonfinite_fraction": share_of(~usable, loss_mask),
    }
    return torch.where(usable, bounded, 0.0), metrics


def sampler_gap(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    segment_ids: TokenIds | None = None,
) -> Metrics:
    """Return metrics of how far the sampler's logprobs are from the trainer's for the same weights.

    With d = log π_prev − log π_gen over the tokens whose sampler logprob is finite, and e^d
    bounded at e²⁰:
    `token_mult_prob_error` = mean exp|d| (1.02 = 2 % off); `gen_kl_error` = mean (eᵈ − 1 − d), the
    k3 estimate of KL(π_gen‖π_prev) in nats; `generation_nonfinite_fraction`, the share of other
    tokens; `token_mult_prob_error_max`, `gen_kl_error_max`: the same means over one sequence, where
    they are largest. Arguments: as `importance_weights`.
    Source: NeMo RL, where `max_seq_mult_prob_error` is `token_mult_prob_error_max`.

    >>> from nemorl.losses.types import finalize
    >>> prev = torch.tensor([[0.25, 0.5], [0.5, 0.5]]).log()
    >>> generation = torch.tensor([[0.5, 0.25], [0.5, 0.5]]).log()
    >>> metrics = finalize(sampler_gap(prev, generation, torch.ones(2, 2, dtype=torch.bool)))
    >>> round(metrics["token_mult_prob_error"], 6), round(metrics["token_mult_prob_error_max"], 6)
    (1.5, 2.0)
    """
    usable = loss_mask & generation_logprobs.isfinite()
    gap = masked(usable, prev_logprobs.detach()) - masked(usable, generation_logprobs.detach())
    errors = {
        "token_mult_prob_error": bounded_exp(gap.abs()),
        "gen_kl_error": gap.clamp(max=MAX_LOG_RATIO).expm1() - gap,
    }
    return {
        **{name: mean_of(error, usable) for name, error in errors.items()},
        **{
            f"{name}_max": max_of(segment_mean(error, usable, segment_ids), usable)
            for name, error in errors.items()
        },
        "generation_nonfinite_fraction": share_of(~usable, loss_mask),
    }

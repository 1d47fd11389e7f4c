"""Off-policy correction w = π_prev/π_gen, π_prev estimated from versions, and how far the sampler
is from the trainer.
"""

import math
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.checks import at_least, require
from nemorl.losses.types import (
    MAX_LOG_RATIO,
    Metrics,
    PerToken,
    Sum,
    TokenIds,
    TokenMask,
    at_least_float32,
    bounded_exp,
    masked,
    max_of,
    mean_of,
    min_of,
    require_one_of,
    same_segment,
    segment_mean,
    segment_sum,
    share_of,
)

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "sequence_mask")
Bounds = tuple[float, float]


SOURCES = """
TIS (Yao et al. 2025): token + truncate, max 2. IcePop (Ling team 2025): token + mask, 0.5 and 5.
NeMo RL and OpenRLHF seq-mask-tis: token + sequence_mask. MIS: TRL token_mask, sequence_mask = level
+ mask (NaN from the sampler is w = 1 there). verl `rollout_rs`: token_k1 = token_bounds,
seq_mean_k1 = geometric_bounds (of the inverse ratio). AReaL `rejection_sampling` (decoupled PPO):
level sequence = geometric, action clamp|mask = truncate|mask. DPPO (Qi et al. 2026): prime-rl,
verl `dppo_tv` = probability_bounds, `dppo_kl` = binary_kl_bounds, with advantages (verl: max=20).
prime-rl: `ipo_threshold` = both without; until 2026-02 `token_mask_*`, `sequence_mask_*`,
`geo_mask_*` = token_, extreme_ and geometric_bounds, `sequence_clip_high` = max with
level="sequence", else w is unbounded there: max=inf. OpenRLHF binary_kl: token = binary_kl_bounds,
without advantages, seq (FlashREINFORCE) = mean_binary_kl.
"""
"""What reproduces papers and other systems, whose settings docs/coming-from.md translates."""


def importance_weights(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    segment_ids: TokenIds | None = None,
    advantages: PerToken | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    min: float = 0.0,
    max: float = 2.0,
    token_bounds: Bounds | None = None,
    extreme_bounds: Bounds | None = None,
    geometric_bounds: Bounds | None = None,
    probability_bounds: Bounds | None = None,
    binary_kl_bounds: Bounds | None = None,
    mean_binary_kl: float | None = None,
) -> tuple[PerToken, Metrics]:
    """Return w = ratio · clamp · masks [batch, seq], the factors of tokens' losses, and metrics.

    With d_t = log π_prev − log π_gen of a sequence's trained tokens, the ratio is exp d_t
    (level="token"), exp Σ d_t ("sequence") or exp mean d_t ("geometric"), at most e²⁰
    (`bounded_exp`). Outside of [min, max] it is clamped (mode="truncate") or w = 0 ("mask"); with
    "sequence_mask" w = 0 in every sequence whose *geometric* ratio is outside, and others keep
    theirs, however large. Whatever level and mode, w = 0 outside of these bounds (low, high):
        token_bounds: tokens by exp d_t.
        extreme_bounds: sequences with any such token.
        geometric_bounds: sequences by exp mean d_t.
        probability_bounds: tokens by π_prev − π_gen, below −low or above high; with `advantages`
            [batch, seq] only where the update moves it further: above high where A > 0, else below.
        binary_kl_bounds: likewise by `_binary_kl`, above low where π_prev < π_gen, else above high.
        mean_binary_kl: sequences by its mean.

    A trained token whose sampler logprob is not finite has w = 0 and no part in its sequence's
    ratio. A NaN in prev_logprobs is passed on. Weights are constants, 0 off the mask; dropped
    tokens still count in the denominators of `loss_weights`. `segment_ids`: as in `policy`.

    Metrics: `importance_ratio_mean/min/max` (before `mode`); shares of the trained tokens:
    `importance_outside_fraction` (of any bounds), `generation_nonfinite_fraction`.
    Raises: ValueError for an unknown level or mode, or wrong bounds. Source: see `SOURCES`.

    >>> prev = torch.tensor([[0.5, 0.3, 0.4]]).log()
    >>> generation, mask = torch.tensor([[0.5, 0.1, 0.8]]).log(), torch.tensor([[True, True, True]])
    >>> importance_weights(prev, generation, mask, max=2.0)[0]
    tensor([[1.0000, 2.0000, 0.5000]])
    >>> importance_weights(prev, generation, mask, max=4.0, probability_bounds=(0.3, 0.3))[0]
    tensor([[1., 3., 0.]])
    """
    require_one_of("level", level, LEVELS)
    require_one_of("mode", mode, MODES)
    _check_bounds((min, max), token_bounds, extreme_bounds, geometric_bounds)
    at_least(0, mean_binary_kl=mean_binary_kl)
    usable = loss_mask & generation_logprobs.isfinite()
    prev, generation = (masked(usable, x.detach()) for x in (prev_logprobs, generation_logprobs))
    ratio = _ratios(prev - generation, usable, segment_ids)
    weight = ratio[level]
    outside = _outside(ratio["geometric" if mode == "sequence_mask" else level], (min, max))
    mean_kl = segment_mean(_binary_kl(generation, prev), usable, segment_ids)
    dropped = (
        (outside & (mode != "truncate"))
        | _outside(ratio["token"], token_bounds)
        | (segment_sum(_outside(ratio["token"], extreme_bounds) & usable, segment_ids) > 0)
        | _outside(ratio["geometric"], geometric_bounds)
        | _moved(prev, generation, usable, advantages, probability_bounds, binary_kl_bounds)
        | (mean_kl > (math.inf if mean_binary_kl is None else mean_binary_kl))
    )
    clamped = weight.clamp(min, max) if mode == "truncate" else weight
    metrics: Metrics = {
        "importance_ratio_mean": mean_of(weight, usable),
        "importance_ratio_min": min_of(weight, usable),
        "importance_ratio_max": max_of(weight, usable),
        "importance_outside_fraction": share_of((outside | dropped) & usable, loss_mask),
        "generation_nonfinite_fraction": share_of(~usable, loss_mask),
    }
    return torch.where(usable & ~dropped, clamped, 0.0), metrics


def _check_bounds(*given: Bounds | None) -> None:
    names = ("(min, max)", "token_bounds", "extreme_bounds", "geometric_bounds")
    for name, bounds in zip(names, given, strict=True):
        fits = bounds is None or 0 <= bounds[0] <= bounds[1]
        require(fits, name, "must be 0 <= low <= high", bounds, "1 = on policy")


def _ratios(
    log_ratio: PerToken, usable: TokenMask, segment_ids: TokenIds | None
) -> dict[str, PerToken]:
    logs = {
        "token": log_ratio,
        "sequence": segment_sum(log_ratio, segment_ids),
        "geometric": segment_mean(log_ratio, usable, segment_ids),
    }
    return {name: bounded_exp(values) for name, values in logs.items()}


def _outside(ratio: PerToken, bounds: Bounds | None) -> TokenMask:
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    return (ratio < low) | (ratio > high)


def _binary_kl(generation: PerToken, prev: PerToken) -> PerToken:
    """Return p log(p/q) + (1 − p) log((1 − p)/(1 − q)), p = π_gen, q = π_prev, both ≤ 1 − 1e-6."""
    log_p, log_q = generation.clamp(max=-1e-6), prev.clamp(max=-1e-6)
    other_p, other_q = -log_p.expm1(), -log_q.expm1()
    return log_p.exp() * (log_p - log_q) + other_p * (other_p.log() - other_q.log())


def _moved(
    prev: PerToken,
    generation: PerToken,
    usable: TokenMask,
    advantages: PerToken | None,
    *given: Bounds | None,
) -> TokenMask:
    """Return where the probability moved beyond `probability_bounds` or `binary_kl_bounds`."""
    change = bounded_exp(prev) - bounded_exp(generation)
    distances = {
        "probability_bounds": change,
        "binary_kl_bounds": change.sign() * _binary_kl(generation, prev),
    }
    moved = torch.zeros_like(usable)
    for (name, distance), bounds in zip(distances.items(), given, strict=True):
        low, high = (math.inf, math.inf) if bounds is None else bounds
        fits = min(low, high) >= 0
        require(fits, name, "must both be at least 0", bounds, "0.2 and 0.2 are usual")
        fell, rose = distance < -low, distance > high
        if advantages is not None:
            rising = masked(usable, advantages.detach()) > 0
            fell, rose = fell & ~rising, rose & rising
        moved = moved | fell | rose
    return moved


def interpolated_logprobs(
    token_logprobs: PerToken,
    generation_logprobs: PerToken,
    policy_versions: TokenIds,
    *,
    version: int,
    progress: float = 1.0,
) -> PerToken:
    """Return log π_prox [batch, seq], the policy of a version before the present one, estimated
    from the sampler's and the present logprobs, to pass as `prev_logprobs`.

    log π_prox = log π_gen + α · (sg log π − log π_gen), α = n / (n + progress), where the token was
    sampled n > 0 versions before `version`; α = 0 where it was not, or by no known version (−1).
    Where the sampler's logprob is not finite it is sg log π.

    policy_versions: the version that sampled each token [batch, seq].
    version: of π_prox. progress: versions between it and the present policy, π; at 0 they are
    the same.

    Raises: ValueError unless progress ≥ 0.
    Source: AReaL `prox_logp_method="loglinear"`, where π_prox is one version before the present
    one: version = `current_version` − 1, progress 1. There α is the same for all minibatches of a
    step; with `version` that of its first one, progress grows by one with each.

    >>> now, generation = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[0.1, 0.1]]).log()
    >>> versions = torch.tensor([[4, 5]])
    >>> interpolated_logprobs(now, generation, versions, version=5).exp()
    tensor([[0.2000, 0.1000]])
    """
    at_least(0, progress=progress)
    now = at_least_float32(token_logprobs.detach())
    generation = at_least_float32(generation_logprobs.detach())
    behind = (version - policy_versions).to(now.dtype)
    older = (policy_versions >= 0) & (behind > 0)
    alpha = torch.where(older, behind / (behind + progress).clamp(min=1), 0.0)
    known = generation.isfinite()
    sampled = torch.where(known, generation, 0.0)
    return torch.where(known, torch.where(older, sampled.lerp(now, alpha), sampled), now)


def sampler_gap(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    segment_ids: TokenIds | None = None,
) -> Metrics:
    """Return metrics of how far the sampler's logprobs are from the trainer's for the same weights.

    With d = log π_prev − log π_gen of the tokens whose sampler logprob is finite, e^d at most e²⁰:
    `token_mult_prob_error` = mean exp|d| (1.02 = 2 % off); `gen_kl_error` = mean (eᵈ − 1 − d), the
    k3 estimate of KL(π_gen‖π_prev) in nats; `token_mult_prob_error_max`, `gen_kl_error_max`: their
    largest means over one sequence; `generation_nonfinite_fraction`, the share of other tokens.
    Arguments: as `importance_weights`.
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


BITS = 0xFFFFFFFF
"""Hashes are integers from 0 to 2^32 − 1, in int64: no product below overflows."""


def _mixed(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return a permutation of 0 … 2^32 − 1 in which each bit depends on all (xorshift-multiply)."""
    for _ in range(2):
        values = ((values ^ (values >> 16)) * 0x45D9F3B) & BITS
    return values ^ (values >> 16)


def token_hashes(
    input_ids: TokenIds, position_ids: TokenIds, generation_logprobs: PerToken
) -> Int[Tensor, "batch seq"]:
    """Return a 32-bit hash of each token, as int64: of all ids of its sequence up to it with their
    positions, and of the bits of its own log-probability in float32.

    With m a mixing permutation of 32-bit integers, h_t = m(Σ_{s ≤ t} m(m(x_s) + s) ⊕ m(bits of
    log π_t)), sums modulo 2^32.

    >>> row = torch.tensor([[5, 6, 5, 6]]), torch.tensor([[0, 1, 0, 1]]), torch.zeros(1, 4)
    >>> hashes = token_hashes(*row)  # of two equal sequences
    >>> torch.equal(hashes[:, :2], hashes[:, 2:])
    True
    """
    positions = position_ids.long()
    own = _mixed((_mixed(input_ids.long() & BITS) + positions) & BITS)
    through = own.cumsum(-1)
    place = torch.arange(own.shape[-1], device=own.device)
    first = (place - positions).clamp(0, max(own.shape[-1] - 1, 0))
    before = (through - own).gather(-1, first)
    bits = generation_logprobs.detach().float().contiguous().view(torch.int32).long() & BITS
    return _mixed(((through - before) & BITS) ^ _mixed(bits))


def token_receipt(
    input_ids: TokenIds, position_ids: TokenIds, generation_logprobs: PerToken, loss_mask: TokenMask
) -> Metrics:
    """Return the number of tokens in `loss_mask` and the sum of their hashes modulo 2^32, as the
    metrics `receipts/tokens` and `receipts/hash`.

    Both add over microbatches and ranks, exactly. Compare hashes modulo 2^32.

    >>> ids, places = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]])
    >>> logprobs, mask = torch.tensor([[0.0, -0.5, -0.25]]), torch.tensor([[False, True, True]])
    >>> found = token_receipt(ids, places, logprobs, mask)
    >>> found["receipts/tokens"].finalize()
    2.0
    """
    hashes = token_hashes(input_ids, position_ids, generation_logprobs)
    total = torch.where(loss_mask, hashes, 0).sum() & BITS
    return {"receipts/tokens": _exact(loss_mask.sum()), "receipts/hash": _exact(total)}


def _exact(count: Int[Tensor, ""]) -> Sum:
    """In main memory where the device has no float64 (mps)."""
    return Sum((count.cpu() if count.device.type == "mps" else count).double())


def support_ratio(
    prev_logprobs: PerToken, generation_logprobs: PerToken, loss_mask: TokenMask
) -> Metrics:
    """Return means of w = π_prev/π_gen and of (w − 1)² over the tokens whose sampler logprob is
    finite, as `receipts/support_ratio` and `receipts/support_square`.

    E[w] over tokens that π_gen draws is Σ π_prev over what π_gen can draw: 1 where both keep the
    same tokens, less where the trainer keeps more.
    Source: TRL issue 7269, where supports that differ gave 0.896.

    >>> prev, generation = torch.tensor([[0.45, 0.45]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> found = support_ratio(prev, generation, torch.ones(1, 2, dtype=torch.bool))
    >>> round(found["receipts/support_ratio"].finalize(), 6)
    0.9
    """
    usable = loss_mask & generation_logprobs.isfinite()
    gap = masked(usable, prev_logprobs.detach()) - masked(usable, generation_logprobs.detach())
    ratio = bounded_exp(gap)
    return {
        "receipts/support_ratio": mean_of(ratio, usable),
        "receipts/support_square": mean_of((ratio - 1).square(), usable),
    }


def gap_by_depth(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    response_mask: TokenMask,
    segment_ids: TokenIds,
) -> Metrics:
    """Return the mean of eᵈ − 1 − d, with d = log π_prev − log π_gen, for tokens at several depths:
    `receipts/kl_from_1` of the first three tokens of responses, `receipts/kl_from_4` of the next
    twelve, `receipts/kl_from_16`, …, each part four times as long as the one before.

    >>> row, ones = torch.zeros(1, 6), torch.ones(1, 6, dtype=torch.long)
    >>> list(gap_by_depth(row, row, ones > 0, ones > 0, ones))
    ['receipts/kl_from_1', 'receipts/kl_from_4']
    """
    usable = loss_mask & generation_logprobs.isfinite()
    gap = masked(usable, prev_logprobs.detach()) - masked(usable, generation_logprobs.detach())
    error = gap.clamp(max=MAX_LOG_RATIO).expm1() - gap
    response = response_mask & (segment_ids > 0)
    follows = pad(response_mask[:, :-1], (1, 0)) & same_segment(segment_ids)
    inside = response.long().cumsum(-1)
    depth = inside - torch.where(response & ~follows, inside - 1, 0).cummax(-1).values
    begins = [4**n for n in range(12) if 4**n <= max(segment_ids.shape[1] - 1, 1)]
    return {
        f"receipts/kl_from_{first}": mean_of(error, usable & (depth >= first) & (depth < end))
        for first, end in pairwise([*begins, math.inf])
    }

"""Losses of preferences and reward models (docs/numerics.md, Preference losses): Σ w·ℓ over pairs.

A sequence's implicit reward is β(log π − log π_ref), or β log π without a reference; h is chosen
minus rejected reward, divided by β.

Arguments that the pair losses share:
    policy_chosen, policy_rejected: `sequence_logprobs` of π, which get the gradient.
    reference_chosen, reference_rejected: the same of π_ref, constants.
    pair_weights: w, built once for the optimizer step (1 / pairs for the mean); 0 = no pair.

Metrics over the pairs: `accuracy` (share with reward chosen > rejected, so 0 where π = π_ref),
`margin` (mean difference of the rewards), `chosen_reward`, `rejected_reward`. An SFT term is added
by the caller: `dpo(...) + nll(chosen_logprobs, sft_coef * weights)`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemorl.checks import at_least, require
from nemorl.losses.types import (
    LossOutput,
    PerPair,
    PerToken,
    Scalar,
    TokenIds,
    TokenMask,
    at_least_float32,
    bounded_exp,
    masked,
    mean_of,
    require_all,
    require_one_of,
    share_of,
    weighted_sum,
)

PerSequence = Float[Tensor, "sequences"]
DIVERGENCES = ("reverse_kl", "forward_kl", "jensen_shannon")


def sequence_logprobs(
    token_logprobs: PerToken,
    mask: TokenMask,
    segment_ids: TokenIds | None = None,
    *,
    num_sequences: int | None = None,
    average: bool = False,
) -> PerSequence:
    """Return each sequence's Σ_t log π over its tokens in `mask`, or their mean with `average`.

    A row is one sequence. With `segment_ids` (0 = padding, 1.. = the sequences of a row) the result
    is [num_sequences], the segments of the batch, row by row, and zeros where it has fewer. A
    sequence without any token has 0. Raises: ValueError if only one of segment_ids and
    num_sequences is given, and for more segments.
    Source: TRL, NeMo RL `preference_average_log_probs`.

    >>> logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> sequence_logprobs(logprobs, mask)
    tensor([-6., -9.])
    >>> segments = torch.tensor([[1, 1, 2], [1, 1, 0]])
    >>> sequence_logprobs(logprobs, mask, segments, num_sequences=3, average=True)
    tensor([-1.5000, -3.0000, -4.5000])
    """
    if (segment_ids is None) != (num_sequences is None):
        raise ValueError("segment_ids and num_sequences go together: pass both for packed rows")
    values = masked(mask, token_logprobs)
    counts = mask.to(values.dtype)
    if segment_ids is None or num_sequences is None:
        total, count = values.sum(-1), counts.sum(-1)
    else:
        in_row = segment_ids.amax(-1)
        require_all(
            in_row.sum() <= num_sequences,
            "num_sequences must be at least the number of segments in segment_ids, but it is"
            f" {num_sequences}: pass int(segment_ids.amax(-1).sum())",
        )
        before = in_row.cumsum(-1) - in_row
        # Place 0 collects the padding and is cut off.
        place = torch.where(segment_ids > 0, before[:, None] + segment_ids, 0).flatten()
        total, count = (
            values.new_zeros(num_sequences + 1).scatter_add(0, place, x.flatten())[1:]
            for x in (values, counts)
        )
    return total / count.clamp(min=1) if average else total


def dpo(
    policy_chosen: PerPair,
    policy_rejected: PerPair,
    reference_chosen: PerPair,
    reference_rejected: PerPair,
    pair_weights: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
    divergence: str | float = "reverse_kl",
) -> LossOutput:
    """Return the loss of direct preference optimization: ℓ = −log σ(βh).

    With label_smoothing = ε, the share of labels believed wrong: ℓ = −(1 − ε)·log σ(βh) −
    ε·log σ(−βh) (conservative DPO); with `robust` (−(1 − ε)·log σ(βh) + ε·log σ(−βh)) / (1 − 2ε).
    h is of `implicit_reward` with `divergence` (f-DPO).

    Raises: ValueError unless 0 ≤ label_smoothing < 0.5, and as `implicit_reward`.
    Source: Rafailov et al. 2023, Mitchell 2023 (cDPO), Chowdhury et al. 2024; TRL
    `loss_type="sigmoid"` and `"robust"`, NeMo RL `reference_policy_kl_penalty` = beta.

    >>> zero, half = torch.zeros(2), torch.full((2,), 0.5)
    >>> dpo(zero, zero, zero, zero, half).loss  # log 2
    tensor(0.6931)
    """
    _require_label_smoothing(label_smoothing)
    chosen, rejected = (
        beta * implicit_reward(_reward(*each, pair_weights), divergence=divergence)
        for each in ((policy_chosen, reference_chosen), (policy_rejected, reference_rejected))
    )
    beta_h, e = chosen - rejected, label_smoothing
    right, wrong = -logsigmoid(beta_h), -logsigmoid(-beta_h)
    losses = (1 - e) * right + e * wrong
    if robust:
        losses = ((1 - e) * right - e * wrong) / (1 - 2 * e)
    return _of_pairs(losses, chosen, rejected, pair_weights)


def implicit_reward(
    log_ratio: PerSequence, *, divergence: str | float = "reverse_kl"
) -> PerSequence:
    """Return f'(u) − f'(1), u = π/π_ref, of the f-divergence that bounds π.

    A number α: (1 − u^−α)/α, bounded at e²⁰/α; reverse_kl, its limit α = 0: log u; forward_kl:
    α = 1; jensen_shannon: log(2u/(1 + u)).

    Raises: ValueError unless 0 ≤ α ≤ 1, or for another name.
    Source: Wang et al. 2023; TRL `f_divergence_type`, `f_alpha_divergence_coef` = 1 − α.

    >>> implicit_reward(torch.tensor([2.0]).log(), divergence="forward_kl")
    tensor([0.5000])
    """
    alpha = divergence
    if isinstance(alpha, str):
        require_one_of("divergence", alpha, DIVERGENCES)
        alpha = DIVERGENCES.index(alpha)
        if alpha == 2:
            return logsigmoid(log_ratio) + math.log(2)
    require(0 <= alpha <= 1, "divergence", "must be in [0, 1]", alpha, "1 is forward_kl")
    return (1 - bounded_exp(-alpha * log_ratio)) / alpha if alpha else log_ratio


def ipo(
    policy_chosen: PerPair,
    policy_rejected: PerPair,
    reference_chosen: PerPair,
    reference_rejected: PerPair,
    pair_weights: PerPair,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Return the loss of identity preference optimization: ℓ = (h − 1/(2β))².

    Raises: ValueError unless β > 0.
    Source: Azar et al. 2023 (β is their τ); TRL `loss_type="ipo"`, which takes averages: pass
    `sequence_logprobs(..., average=True)`.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> ipo(one, -one, zero, zero, one, beta=0.25).loss  # (2 - 2)²
    tensor(0.)
    """
    require(beta > 0, "beta", "must be above 0", beta, "0.1 is usual")
    chosen = _reward(policy_chosen, reference_chosen, pair_weights)
    rejected = _reward(policy_rejected, reference_rejected, pair_weights)
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return _of_pairs(losses, beta * chosen, beta * rejected, pair_weights)


def hinge(
    policy_chosen: PerPair,
    policy_rejected: PerPair,
    reference_chosen: PerPair,
    reference_rejected: PerPair,
    pair_weights: PerPair,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Return the loss of sequence likelihood calibration: ℓ = max(0, 1 − βh).

    Source: SLiC-HF (Zhao et al. 2023), RSO; TRL `loss_type="hinge"`.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> hinge(4 * one, -one, zero, zero, one, beta=0.1).loss  # 1 - 0.1 · 5
    tensor(0.5000)
    """
    chosen = _reward(policy_chosen, reference_chosen, pair_weights, beta)
    rejected = _reward(policy_rejected, reference_rejected, pair_weights, beta)
    return _of_pairs((1 - (chosen - rejected)).relu(), chosen, rejected, pair_weights)


def simpo(
    policy_chosen: PerPair,
    policy_rejected: PerPair,
    pair_weights: PerPair,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Return the loss of simple preference optimization: ℓ = −log σ(βh − margin), no reference.

    Takes averages: `sequence_logprobs(..., average=True)`. `label_smoothing`, Raises: as `dpo`. The
    metric `margin` is βh.
    Source: Meng et al. 2024 (γ is `margin`); TRL `CPOConfig(loss_type="simpo",
    simpo_gamma=margin)`.

    >>> one = torch.ones(1)
    >>> round(simpo(-one, -2 * one, one, beta=2.0, margin=1.0).loss.item(), 4)  # -log σ(2 - 1)
    0.3133
    """
    _require_label_smoothing(label_smoothing)
    chosen = _reward(policy_chosen, None, pair_weights, beta)
    rejected = _reward(policy_rejected, None, pair_weights, beta)
    logit = chosen - rejected - margin
    losses = -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    return _of_pairs(losses, chosen, rejected, pair_weights)


def orpo(
    policy_chosen: PerPair, policy_rejected: PerPair, pair_weights: PerPair, *, coef: float = 0.1
) -> LossOutput:
    """Return the odds-ratio term of ORPO: ℓ = −coef · log σ(log odds(chosen) − log odds(rejected)).

    odds = p/(1 − p), p = exp of the *mean* logprob: `sequence_logprobs(..., average=True)`. A mean
    above −eps (p = 1 in float32) counts as −eps, with gradient 0. The SFT term is the caller's. In
    the metrics a reward is `coef` · mean logprob.
    Source: Hong et al. 2024 (coef is their λ, 0.1); TRL `ORPOConfig(beta=coef)`.

    >>> chosen, rejected = torch.tensor([0.75]).log(), torch.tensor([0.25]).log()  # odds 3 and 1/3
    >>> round(orpo(chosen, rejected, torch.ones(1), coef=1.0).loss.item(), 4)  # -log σ(log 9)
    0.1054
    """
    chosen = _reward(policy_chosen, None, pair_weights)
    rejected = _reward(policy_rejected, None, pair_weights)
    losses = -coef * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _of_pairs(losses, coef * chosen, coef * rejected, pair_weights)


def kto(
    policy: PerSequence,
    reference: PerSequence,
    desirable: Bool[Tensor, "sequences"],
    sequence_weights: PerSequence,
    kl: Scalar | None = None,
    *,
    beta: float = 0.1,
    desirable_coef: float = 1.0,
    undesirable_coef: float = 1.0,
) -> LossOutput:
    """Return the loss of Kahneman-Tversky optimization, which is unpaired.

    With x = β(log π − log π_ref − max(kl, 0)): ℓ = desirable_coef · (1 − σ(x)) where desirable,
    undesirable_coef · (1 − σ(−x)) elsewhere.

    Args:
        policy, reference: `sequence_logprobs` of π and π_ref.
        desirable: True where the answer is wanted.
        sequence_weights: as `pair_weights`.
        kl: KL(π‖π_ref) in nats per sequence, a constant: the mean of log π − log π_ref over
            mismatched prompts and completions of the *whole* step. None: 0, which is TRL
            `loss_type="apo_zero_unpaired"`.
    Metrics: `desirable_reward`, `undesirable_reward` (means of β(log π − log π_ref)),
    `desirable_fraction`.
    Source: Ethayarajh et al. 2024; TRL `KTOConfig(desirable_weight, undesirable_weight)`.

    >>> policy, desirable = torch.tensor([10.0, 10.0]), torch.tensor([True, False])
    >>> output = kto(policy, torch.zeros(2), desirable, torch.tensor([1.0, 0.0]), beta=0.1)
    >>> round(output.loss.item(), 4)  # 1 - σ(1)
    0.2689
    """
    mask = sequence_weights != 0
    log_ratio = _reward(policy, reference, sequence_weights)
    baseline = 0.0 if kl is None else at_least_float32(kl.detach()).clamp(min=0)
    x = beta * (log_ratio - baseline)
    losses = torch.where(desirable, desirable_coef * (-x).sigmoid(), undesirable_coef * x.sigmoid())
    metrics = {
        "desirable_reward": mean_of(beta * log_ratio, mask & desirable),
        "undesirable_reward": mean_of(beta * log_ratio, mask & ~desirable),
        "desirable_fraction": share_of(desirable, mask),
    }
    return LossOutput(weighted_sum(sequence_weights, losses), metrics)


def bradley_terry(
    chosen_scores: PerPair,
    rejected_scores: PerPair,
    pair_weights: PerPair,
    margin: PerPair | None = None,
    *,
    centering: float = 0.0,
) -> LossOutput:
    """Return a reward model's loss: ℓ = −log σ(score_c − score_r − margin) + centering · (score_c +
    score_r)².

    margin: how much better the chosen answer is known to be; None = 0. centering: 0 leaves the
    scores' mean free.

    Metrics: the module's; `score_sum_square`, the mean of (score_c + score_r)².
    Raises: ValueError unless centering ≥ 0.
    Source: Bradley & Terry 1952; Llama 2's margin; TRL RewardTrainer `center_rewards_coefficient`
    (0.01), NeMo RL `PreferenceLossFn`.

    >>> one = torch.ones(1)
    >>> round(bradley_terry(3 * one, one, one, one, centering=0.5).loss.item(), 4)  # -log σ(1) + 8
    8.3133
    """
    at_least(0, centering=centering)
    chosen = _reward(chosen_scores, None, pair_weights)
    rejected = _reward(rejected_scores, None, pair_weights)
    required = 0.0 if margin is None else masked(pair_weights != 0, margin.detach())
    square = (chosen + rejected).square()
    losses = centering * square - logsigmoid(chosen - rejected - required)
    output = _of_pairs(losses, chosen, rejected, pair_weights)
    center = {"score_sum_square": mean_of(square, pair_weights != 0)}
    return LossOutput(output.loss, {**output.metrics, **center})


def _reward(policy: Tensor, reference: Tensor | None, weights: Tensor, beta: float = 1.0) -> Tensor:
    """β(log π − log π_ref) where there is a weight, or β log π without a reference."""
    mask = weights != 0
    if reference is None:
        return beta * masked(mask, policy)
    return beta * (masked(mask, policy) - masked(mask, reference.detach()))


def _of_pairs(losses: Tensor, chosen: Tensor, rejected: Tensor, pair_weights: Tensor) -> LossOutput:
    mask = pair_weights != 0
    metrics = {
        "accuracy": share_of(chosen > rejected, mask),
        "margin": mean_of(chosen - rejected, mask),
        "chosen_reward": mean_of(chosen, mask),
        "rejected_reward": mean_of(rejected, mask),
    }
    return LossOutput(weighted_sum(pair_weights, losses), metrics)


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 − p)) from log p, without cancellation at either end."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - (-logprob.expm1()).log()


def _require_label_smoothing(value: float) -> None:
    require(0 <= value < 0.5, "label_smoothing", "must be in [0, 0.5)", value, "try 0.1")

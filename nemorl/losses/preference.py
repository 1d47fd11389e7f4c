"""Preference losses and the reward model's, on one number per sequence.

Pairs are two arrays of equal length, chosen and rejected; `pair_weights` are to pairs what
`loss_weights` are to tokens: built once for the whole optimizer step (1 / number of pairs for the
mean), 0 = the pair isn't there. With the implicit reward β(log π − log π_ref), the log-ratio of a
pair is h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected); losses without a reference
have h = log π(chosen) − log π(rejected).

Metrics over the pairs: `accuracy` (share with reward chosen > rejected, so 0 where π = π_ref),
`margin` (mean difference of the rewards), `chosen_reward`, `rejected_reward`. An SFT term is the
caller's: `dpo(...) + nll(chosen_logprobs, sft_coef * weights)`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemorl.losses.masked import masked, mean_of, share_of, weighted_sum
from nemorl.losses.segments import at_least_float32
from nemorl.losses.types import LossOutput, Metrics


def sequence_logprobs(
    token_logprobs: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    segment_ids: Int[Tensor, "batch seq"] | None = None,
    *,
    num_sequences: int | None = None,
    average: bool = False,
) -> Float[Tensor, "sequences"]:
    """Σ_t log π over a sequence's tokens in `mask`, or with `average` their mean (a sequence
    without any: 0).

    A row is one sequence, and the result is [batch]; with `segment_ids` (0 = padding, 1.. = the
    sequences of a row) rows are packed, and the result is [num_sequences] in packed order: row by
    row, in each by segment. `num_sequences` must be the number of segments in the whole batch: a
    shape can't depend on data. Raises: ValueError if only one of segment_ids and num_sequences is
    given. Source: TRL, NeMo RL `preference_average_log_probs`.

    >>> logprobs, mask = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]), torch.tensor([[True, True, True], [True, True, False]])
    >>> sequence_logprobs(logprobs, mask)
    tensor([-6., -9.])
    >>> sequence_logprobs(logprobs, mask, torch.tensor([[1, 1, 2], [1, 1, 0]]), num_sequences=3, average=True)
    tensor([-1.5000, -3.0000, -4.5000])
    """
    if (segment_ids is None) != (num_sequences is None):
        raise ValueError(
            f"segment_ids and num_sequences go together, but num_sequences is {num_sequences} and"
            f" segment_ids are {'absent' if segment_ids is None else 'given'}. For packed rows pass"
            " both, for one sequence a row neither."
        )
    values = masked(mask, token_logprobs)
    counts = mask.to(values.dtype)
    if segment_ids is None or num_sequences is None:
        total, count = values.sum(-1), counts.sum(-1)
    else:
        in_row = segment_ids.amax(-1)
        before = in_row.cumsum(-1) - in_row
        place = torch.where(
            segment_ids > 0, before[:, None] + segment_ids, 0
        ).flatten()  # place 0 collects the padding and is cut off
        total, count = (
            values.new_zeros(num_sequences + 1).scatter_add(0, place, x.flatten())[1:]
            for x in (values, counts)
        )
    return total / count.clamp(min=1) if average else total


def dpo(
    policy_chosen: Float[Tensor, "pairs"],
    policy_rejected: Float[Tensor, "pairs"],
    reference_chosen: Float[Tensor, "pairs"],
    reference_rejected: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
) -> LossOutput:
    """Direct preference optimisation: ℓ = −log σ(βh).

    `label_smoothing` ε, the share of labels believed wrong: ℓ = −(1 − ε)·log σ(βh) − ε·log σ(−βh)
    (conservative DPO); with `robust` ℓ = (−(1 − ε)·log σ(βh) + ε·log σ(−βh)) / (1 − 2ε), which is
    unbiased under that noise. Raises: ValueError unless 0 ≤ label_smoothing < 0.5. Source: Rafailov
    et al. 2023, Mitchell 2023 (cDPO), Chowdhury et al. 2024; TRL `loss_type="sigmoid"` and
    `"robust"`, NeMo RL `reference_policy_kl_penalty` = beta.

    >>> zero, half = torch.zeros(2), torch.full((2,), 0.5)
    >>> dpo(zero, zero, zero, zero, half).loss  # log 2
    tensor(0.6931)
    >>> round(dpo(torch.tensor([0.0]), torch.tensor([-10.0]), torch.zeros(1), torch.zeros(1), torch.ones(1), beta=0.1).loss.item(), 4)  # -log σ(1)
    0.3133
    """
    _require_label_smoothing(label_smoothing)
    chosen, rejected = _rewards(
        policy_chosen, policy_rejected, reference_chosen, reference_rejected, pair_weights, beta
    )
    logit = chosen - rejected
    right, wrong = -logsigmoid(logit), -logsigmoid(-logit)
    if robust:
        losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (
            1 - 2 * label_smoothing
        )
    else:
        losses = (1 - label_smoothing) * right + label_smoothing * wrong
    return LossOutput(
        weighted_sum(pair_weights, losses), _pair_metrics(chosen, rejected, pair_weights)
    )


def ipo(
    policy_chosen: Float[Tensor, "pairs"],
    policy_rejected: Float[Tensor, "pairs"],
    reference_chosen: Float[Tensor, "pairs"],
    reference_rejected: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Identity preference optimisation: ℓ = (h − 1/(2β))², a regression that can't run away when
    the labels are certain.

    Raises: ValueError unless β > 0. Source: Azar et al. 2023 (β is their τ); TRL `loss_type="ipo"`,
    which takes averages: pass `sequence_logprobs(..., average=True)`.

    >>> ipo(torch.tensor([1.0]), torch.tensor([-1.0]), torch.zeros(1), torch.zeros(1), torch.ones(1), beta=0.25).loss  # (2 - 2)²
    tensor(0.)
    """
    _require_positive("beta", beta)
    chosen, rejected = _rewards(
        policy_chosen, policy_rejected, reference_chosen, reference_rejected, pair_weights, 1.0
    )
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return LossOutput(
        weighted_sum(pair_weights, losses),
        _pair_metrics(beta * chosen, beta * rejected, pair_weights),
    )


def hinge(
    policy_chosen: Float[Tensor, "pairs"],
    policy_rejected: Float[Tensor, "pairs"],
    reference_chosen: Float[Tensor, "pairs"],
    reference_rejected: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Sequence likelihood calibration: ℓ = max(0, 1 − βh). Source: SLiC-HF (Zhao et al. 2023), RSO;
    TRL `loss_type="hinge"`.

    >>> hinge(torch.tensor([4.0]), torch.tensor([-1.0]), torch.zeros(1), torch.zeros(1), torch.ones(1), beta=0.1).loss  # 1 - 0.1 · 5
    tensor(0.5000)
    """
    chosen, rejected = _rewards(
        policy_chosen, policy_rejected, reference_chosen, reference_rejected, pair_weights, beta
    )
    return LossOutput(
        weighted_sum(pair_weights, (1 - (chosen - rejected)).relu()),
        _pair_metrics(chosen, rejected, pair_weights),
    )


def simpo(
    policy_chosen: Float[Tensor, "pairs"],
    policy_rejected: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Simple preference optimisation, without a reference: ℓ = −log σ(βh − margin) on
    length-averaged logprobs (`sequence_logprobs(..., average=True)`).

    `label_smoothing` as the conservative one of `dpo`. The metric `margin` is βh, without the
    target margin. Raises: ValueError unless 0 ≤ label_smoothing < 0.5. Source: Meng et al. 2024;
    their γ is our `margin`; TRL `CPOConfig(loss_type="simpo", simpo_gamma=margin)`.

    >>> round(simpo(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.ones(1), beta=2.0, margin=1.0).loss.item(), 4)  # -log σ(2 - 1)
    0.3133
    """
    zero = torch.zeros_like(policy_chosen)
    _require_label_smoothing(label_smoothing)
    chosen, rejected = _rewards(policy_chosen, policy_rejected, zero, zero, pair_weights, beta)
    logit = chosen - rejected - margin
    losses = -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    return LossOutput(
        weighted_sum(pair_weights, losses), _pair_metrics(chosen, rejected, pair_weights)
    )


def orpo(
    policy_chosen: Float[Tensor, "pairs"],
    policy_rejected: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    *,
    coef: float = 0.1,
) -> LossOutput:
    """The odds-ratio term of ORPO, without a reference: ℓ = −coef · log σ(log odds(chosen) − log
    odds(rejected)), odds = p/(1 − p), p = exp of the *mean* logprob.

    Takes `sequence_logprobs(..., average=True)`; the SFT term is the caller's `nll` on the chosen
    sequences. A mean logprob above −eps (p = 1 in float32) counts as −eps, where its gradient is 0.
    Metrics: rewards are `coef` · mean logprob. Source: Hong et al. 2024 (coef is their λ, 0.1); TRL
    `ORPOConfig(beta=coef)`.

    >>> chosen, rejected = torch.tensor([0.75]).log(), torch.tensor([0.25]).log()  # odds 3 and 1/3
    >>> round(orpo(chosen, rejected, torch.ones(1), coef=1.0).loss.item(), 4)  # -log σ(log 9) = -log 0.9
    0.1054
    """
    mask = pair_weights != 0
    chosen, rejected = masked(mask, policy_chosen), masked(mask, policy_rejected)
    losses = -coef * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return LossOutput(
        weighted_sum(pair_weights, losses),
        _pair_metrics(coef * chosen, coef * rejected, pair_weights),
    )


def kto(
    policy: Float[Tensor, "sequences"],
    reference: Float[Tensor, "sequences"],
    desirable: Bool[Tensor, "sequences"],
    sequence_weights: Float[Tensor, "sequences"],
    kl: Float[Tensor, ""] | None = None,
    *,
    beta: float = 0.1,
    desirable_coef: float = 1.0,
    undesirable_coef: float = 1.0,
) -> LossOutput:
    """Kahneman-Tversky optimisation, unpaired: with x = β(log π − log π_ref − max(kl, 0)), ℓ =
    λ_D(1 − σ(x)) where desirable, λ_U(1 − σ(−x)) elsewhere.

    `kl` is the baseline KL(π‖π_ref) in nats per sequence, a constant: the mean of log π − log π_ref
    over mismatched prompt-completion pairs of the *whole* step, so that shards still add; None: 0,
    which is TRL `loss_type="apo_zero_unpaired"`. λ_D, λ_U = `desirable_coef`, `undesirable_coef`.
    Metrics: `desirable_reward`, `undesirable_reward` (means of β(log π − log π_ref)),
    `desirable_fraction`. Source: Ethayarajh et al. 2024; TRL `KTOConfig(desirable_weight,
    undesirable_weight)`.

    >>> output = kto(torch.tensor([10.0, 10.0]), torch.zeros(2), torch.tensor([True, False]), torch.tensor([1.0, 0.0]), beta=0.1)
    >>> round(output.loss.item(), 4)  # 1 - σ(1)
    0.2689
    """
    mask = sequence_weights != 0
    log_ratio = masked(mask, policy) - masked(mask, reference.detach())
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
    chosen_scores: Float[Tensor, "pairs"],
    rejected_scores: Float[Tensor, "pairs"],
    pair_weights: Float[Tensor, "pairs"],
    margin: Float[Tensor, "pairs"] | None = None,
) -> LossOutput:
    """A reward model's loss: ℓ = −log σ(score_c − score_r − margin). Units: the model's own; only
    differences count.

    `margin`: how much better the chosen one is said to be, None = 0. Source: Bradley & Terry 1952;
    Llama 2's margin; TRL RewardTrainer, NeMo RL `PreferenceLossFn`.

    >>> round(bradley_terry(torch.tensor([3.0]), torch.tensor([1.0]), torch.ones(1), torch.tensor([1.0])).loss.item(), 4)  # -log σ(1)
    0.3133
    """
    mask = pair_weights != 0
    chosen, rejected = masked(mask, chosen_scores), masked(mask, rejected_scores)
    required = 0.0 if margin is None else masked(mask, margin.detach())
    losses = -logsigmoid(chosen - rejected - required)
    return LossOutput(
        weighted_sum(pair_weights, losses), _pair_metrics(chosen, rejected, pair_weights)
    )


def _rewards(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    pair_weights: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    mask = pair_weights != 0
    chosen = masked(mask, policy_chosen) - masked(mask, reference_chosen.detach())
    rejected = masked(mask, policy_rejected) - masked(mask, reference_rejected.detach())
    return beta * chosen, beta * rejected


def _pair_metrics(chosen: Tensor, rejected: Tensor, pair_weights: Tensor) -> Metrics:
    mask = pair_weights != 0
    return {
        "accuracy": share_of(chosen > rejected, mask),
        "margin": mean_of(chosen - rejected, mask),
        "chosen_reward": mean_of(chosen, mask),
        "rejected_reward": mean_of(rejected, mask),
    }


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 − p)) from log p, without cancellation at either end."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - (-logprob.expm1()).log()


def _require_label_smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise ValueError(
            f"label_smoothing must be in [0, 0.5), but it is {value}. It is the share of pairs"
            " whose label is believed to be wrong: try 0.1."
        )


def _require_positive(field: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{field} must be > 0, but it is {value}. 0.1 is usual.")

"""The loss of a preference step, whose constants come from the whole step, so that parts of it add
up however it is cut.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.data.packing import num_segments
from nemorl.losses import preference
from nemorl.losses.masked import mean_of
from nemorl.losses.masks import sequence_mean_weights, token_mean_weights
from nemorl.losses.preference import sequence_logprobs
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, merge
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.runtime.config.preference import (
    DPOConfig,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    PreferenceLossConfig,
    SimPOLoss,
)


def make_loss(config: DPOConfig, batch: TokenBatch, kl: Float[Tensor, ""] | None = None) -> LossFn:
    """The configured loss of the step whose whole batch is `batch`, as a function of what the model
    says about a part of it.

    In `batch` a row is a pair, segment 1 chosen and segment 2 rejected, or for KTO any number of
    responses labelled by the sign of `advantages`. Each pair (KTO: response) weighs 1 / their
    number in the step. `kl` is KTO's baseline. The mean negative log-likelihood of the chosen
    responses is a metric, and as `loss_weights` say (see `with_loss_weights`), times `sft_coef`, a
    term of the loss.
    """
    weight = 1 / max(1, int(trained(config.loss, batch).sum()))
    return partial(preference_loss, config=config, weight=weight, kl=kl)


def preference_loss(
    output: ForwardOutput,
    part: TokenBatch,
    *,
    config: DPOConfig,
    weight: float,
    kl: Float[Tensor, ""] | None,
) -> LossOutput:
    """What `make_loss` makes, which can be sent to other processes; `weight` is that of a pair
    (KTO: a response).
    """
    assert part.loss_weights is not None
    weights = torch.where(trained(config.loss, part), weight, 0.0)
    result = preference_term(config.loss, output.token_logprobs, part, weights, kl)
    likelihood = nll(output.token_logprobs, part.loss_weights)
    metrics = {"nll": likelihood.metrics["nll"], "entropy": mean_of(output.entropy, part.loss_mask)}
    loss = result.loss + config.sft_weight * likelihood.loss if config.sft_weight else result.loss
    return LossOutput(loss, merge(result.metrics, metrics))


def with_loss_weights(batch: TokenBatch, config: DPOConfig) -> TokenBatch:
    """The batch with the weights of the likelihood term: the chosen responses' tokens, of the pairs
    that count.
    """
    if isinstance(config.loss, KTOLoss):
        assert batch.advantages is not None
        mask = batch.loss_mask & (batch.advantages > 0)
    else:
        mask = batch.loss_mask & (batch.segment_ids == 1) & trained(config.loss, batch)[:, None]
    weights = (
        token_mean_weights(mask)
        if config.sft_reduction == "token_mean"
        else sequence_mean_weights(mask, batch.segment_ids)
    )
    return replace(batch, loss_weights=weights)


def preference_term(
    loss: PreferenceLossConfig,
    token_logprobs: Float[Tensor, "batch seq"],
    part: TokenBatch,
    weights: Float[Tensor, "items"],
    kl: Tensor | None,
) -> LossOutput:
    """The preference loss itself, of the pairs (KTO: responses) in a part of the batch, in order,
    with their weights.
    """
    policy = scores(loss, token_logprobs, part)
    reference = (
        torch.zeros_like(policy)
        if part.reference_logprobs is None
        else scores(loss, part.reference_logprobs, part)
    )
    pairs = (policy[0::2], policy[1::2], reference[0::2], reference[1::2], weights)
    match loss:
        case DPOLoss(beta=beta, label_smoothing=smoothing, robust=robust):
            return preference.dpo(*pairs, beta=beta, label_smoothing=smoothing, robust=robust)
        case IPOLoss(beta=beta):
            return preference.ipo(*pairs, beta=beta)
        case HingeLoss(beta=beta):
            return preference.hinge(*pairs, beta=beta)
        case SimPOLoss(beta=beta, margin=margin, label_smoothing=smoothing):
            return preference.simpo(
                policy[0::2],
                policy[1::2],
                weights,
                beta=beta,
                margin=margin,
                label_smoothing=smoothing,
            )
        case ORPOLoss(coef=coef):
            return preference.orpo(policy[0::2], policy[1::2], weights, coef=coef)
        case KTOLoss(beta=beta, desirable_coef=desirable, undesirable_coef=undesirable):
            coefs = {"desirable_coef": desirable, "undesirable_coef": undesirable}
            return preference.kto(
                policy,
                reference,
                labels(part),
                weights,
                kl if kl is None else kl.to(policy.device),
                beta=beta,
                **coefs,
            )


def scores(
    loss: PreferenceLossConfig, token_logprobs: Float[Tensor, "batch seq"], part: TokenBatch
) -> Float[Tensor, "sequences"]:
    """log π of every response, row by row and in each by segment: the sum over its tokens, or their
    mean where the loss takes that.
    """
    match loss:
        case SimPOLoss() | ORPOLoss():
            average = True
        case KTOLoss():
            average = False
        case _:
            average = loss.average_logprobs
    return _by_sequence(token_logprobs, part, average=average)


def rewards(
    loss: PreferenceLossConfig, token_logprobs: Float[Tensor, "batch seq"], part: TokenBatch
) -> Float[Tensor, "sequences"]:
    """The implicit reward of every response: β(log π − log π_ref), or β·log π where the loss has no
    reference (orpo: coef·log π).
    """
    difference = scores(loss, token_logprobs, part)
    if part.reference_logprobs is not None:
        difference = difference - scores(loss, part.reference_logprobs, part)
    return (loss.coef if isinstance(loss, ORPOLoss) else loss.beta) * difference


def labels(part: TokenBatch) -> Bool[Tensor, "sequences"]:
    """Which responses are desirable (KTO)."""
    assert part.advantages is not None
    return _by_sequence(part.advantages, part) > 0


def trained(loss: PreferenceLossConfig, part: TokenBatch) -> Bool[Tensor, "items"]:
    """Which pairs have a token to train on in both responses; for KTO, which responses have one."""
    there = _by_sequence(part.loss_mask.float(), part) > 0
    return there if isinstance(loss, KTOLoss) else there[0::2] & there[1::2]


def _by_sequence(
    values: Float[Tensor, "batch seq"], part: TokenBatch, *, average: bool = False
) -> Float[Tensor, "sequences"]:
    return sequence_logprobs(
        values,
        part.loss_mask,
        part.segment_ids,
        num_sequences=int(num_segments(part.segment_ids).sum()),
        average=average,
    )

"""The loss of a preference step. Its constants are the whole step's, so that parts add up."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.data.packing import num_segments
from nemorl.data.padding import round_up
from nemorl.losses import preference
from nemorl.losses.masks import sequence_mean_weights, token_mean_weights
from nemorl.losses.preference import sequence_logprobs
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.runtime.config.dpo import (
    DPOConfig,
    KTOLoss,
    ORPOLoss,
    PreferenceLossConfig,
    SimPOLoss,
)


def make_loss(config: DPOConfig, batch: TokenBatch, kl: float | None = None) -> LossFn:
    """Return the configured loss of a part of the step whose whole batch is `batch`.

    A row is a pair, segment 1 chosen and segment 2 rejected, or for KTO responses labelled by the
    sign of `advantages`. Each weighs 1 / their number in the step. kl: KTO's baseline.
    """
    single = isinstance(config.loss, KTOLoss)
    return partial(
        preference_loss,
        term=preference_term(config.loss),
        needs_reference=config.needs_reference,
        single=single,
        average=averages(config.loss),
        weight=1 / max(1, int(trained(batch, single=single).sum())),
        kl=kl,
        sft_weight=config.sft_weight,
    )


def preference_loss(
    output: ForwardOutput,
    part: TokenBatch,
    *,
    term: Callable[..., LossOutput],
    needs_reference: bool,
    single: bool,
    average: bool,
    weight: float,
    kl: float | None,
    sft_weight: float,
) -> LossOutput:
    """Return preference term + `sft_weight` · negative log-likelihood of a part of a step.

    Each pair (`single`: each labelled response) weighs `weight`; a response's score is the sum of
    its tokens' logprobs, or with `average` their mean.
    """
    assert part.loss_weights is not None
    # As many as there can be, in pairs: to count them the host would wait for the device.
    options: dict[str, Any] = {"num": round_up(part.input_ids.numel(), 2)}
    scores = by_sequence(output.token_logprobs, part, average=average, **options)
    data = [scores] if single else [scores[0::2], scores[1::2]]
    if needs_reference:
        assert part.reference_logprobs is not None
        reference = by_sequence(part.reference_logprobs, part, average=average, **options)
        data += [reference] if single else [reference[0::2], reference[1::2]]
    constants = {}
    if single:
        assert part.advantages is not None
        data.append(by_sequence(part.advantages, part, **options) > 0)
        constants["kl"] = None if kl is None else scores.new_full((), kl)
    weights = torch.where(trained(part, single=single, **options), weight, 0.0)
    result = term(*data, weights, **constants)
    likelihood = nll(output.token_logprobs, part.loss_weights)
    loss = result.loss + sft_weight * likelihood.loss if sft_weight else result.loss
    return LossOutput(loss, {**result.metrics, "nll": likelihood.metrics["nll"]})


def preference_term(loss: PreferenceLossConfig) -> Callable[..., LossOutput]:
    """Return the loss's function with its constants."""
    constants = asdict(loss)
    function = getattr(preference, constants.pop("name"))
    for not_of_the_term in ("average_logprobs", "baseline"):
        constants.pop(not_of_the_term, None)
    return partial(function, **constants)


def with_loss_weights(batch: TokenBatch, config: DPOConfig) -> TokenBatch:
    """Add weights of the likelihood term."""
    if isinstance(config.loss, KTOLoss):
        assert batch.advantages is not None
        mask = batch.loss_mask & (batch.advantages > 0)
    else:
        counts = trained(batch, single=False)[:, None]
        mask = batch.loss_mask & (batch.segment_ids == 1) & counts
    if config.sft_reduction == "token_mean":
        return replace(batch, loss_weights=token_mean_weights(mask))
    return replace(batch, loss_weights=sequence_mean_weights(mask, batch.segment_ids))


def rewards(
    loss: PreferenceLossConfig, token_logprobs: Float[Tensor, "batch seq"], part: TokenBatch
) -> Float[Tensor, "sequences"]:
    """Return the implicit reward of every response: β(log π − log π_ref), without a reference
    β·log π (orpo: coef·log π).
    """
    average = averages(loss)
    difference = by_sequence(token_logprobs, part, average=average)
    if part.reference_logprobs is not None:
        difference = difference - by_sequence(part.reference_logprobs, part, average=average)
    return (loss.coef if isinstance(loss, ORPOLoss) else loss.beta) * difference


def averages(loss: PreferenceLossConfig) -> bool:
    """Return whether scores are means of logprobs."""
    if isinstance(loss, SimPOLoss | ORPOLoss):
        return True
    return not isinstance(loss, KTOLoss) and loss.average_logprobs


def trained(part: TokenBatch, *, single: bool, num: int | None = None) -> Bool[Tensor, "items"]:
    """Return which pairs (`single`: responses) have tokens to train on."""
    found = by_sequence(part.loss_mask.float(), part, num=num) > 0
    return found if single else found[0::2] & found[1::2]


def by_sequence(
    values: Float[Tensor, "batch seq"],
    part: TokenBatch,
    *,
    average: bool = False,
    num: int | None = None,
) -> Float[Tensor, "sequences"]:
    """Return the sum or mean over each response's trained tokens, with zeros up to `num`."""
    return sequence_logprobs(
        values,
        part.loss_mask,
        part.segment_ids,
        num_sequences=num_sequences(part) if num is None else num,
        average=average,
    )


def num_sequences(part: TokenBatch) -> int:
    """Count the responses; a GPU's host waits."""
    return int(num_segments(part.segment_ids).sum())

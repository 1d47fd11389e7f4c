"""The losses of the cases: our own functions, put together as an algorithm would."""

from collections.abc import Callable

import torch

from nemorl.data.batch import TokenBatch
from nemorl.data.packing import num_segments
from nemorl.losses.policy import clipped, entropy_bonus, gspo, kl_loss
from nemorl.losses.preference import dpo, sequence_logprobs
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, Needs, Sum
from nemorl.parallel.backend import REMEDIES, ForwardOutput, LossFn
from tests.parallel.parity.golden import LENGTHS

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, SEQUENCE_CLIP = 0.2, 0.28, 3.0, 0.05
KL_COEF, ENTROPY_COEF, BETA = 0.1, 0.05, 0.1
PAIR_WEIGHT = 2 / len(LENGTHS)


def policy(output: ForwardOutput, part: TokenBatch) -> LossOutput:
    assert (
        part.loss_weights is not None
        and part.prev_logprobs is not None
        and part.advantages is not None
        and part.reference_logprobs is not None
    )
    arrays = (output.token_logprobs, part.prev_logprobs, part.advantages, part.loss_weights)
    terms = {
        "token": clipped(*arrays, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=DUAL_CLIP),
        "sequence": gspo(
            *arrays, part.segment_ids, clip_low=SEQUENCE_CLIP, clip_high=SEQUENCE_CLIP
        ),
        "kl": kl_loss(
            output.token_logprobs, part.reference_logprobs, part.loss_weights, coef=KL_COEF
        ),
        "entropy": entropy_bonus(output.entropy, part.loss_weights, coef=ENTROPY_COEF),
    }
    metrics = {
        f"{name}/{metric}": value
        for name, term in terms.items()
        for metric, value in term.metrics.items()
    }
    return LossOutput(torch.stack([term.loss for term in terms.values()]).sum(), metrics)


def pairs(output: ForwardOutput, part: TokenBatch) -> LossOutput:
    assert part.reference_logprobs is not None
    count = int(num_segments(part.segment_ids).sum())
    ours, theirs = (
        sequence_logprobs(values, part.loss_mask, part.segment_ids, num_sequences=count)
        for values in (output.token_logprobs, part.reference_logprobs)
    )
    weights = ours.new_full((count // 2,), PAIR_WEIGHT)
    return dpo(ours[0::2], ours[1::2], theirs[0::2], theirs[1::2], weights, beta=BETA)


def likelihood(output: ForwardOutput, part: TokenBatch) -> LossOutput:
    assert part.loss_weights is not None
    return nll(output.token_logprobs, part.loss_weights)


def soft(output: ForwardOutput, part: TokenBatch) -> LossOutput:
    found = likelihood(output, part)
    assert part.loss_weights is not None
    for i, name in enumerate(SETS):
        values = getattr(output, name).view(*part.input_ids.shape, -1).sum(-1)
        found = found + LossOutput(0.02 * (i + 1) * (part.loss_weights * values).sum(), {})
    return found


SETS = tuple(name for name in REMEDIES if name.endswith("_logprobs") and name != "token_logprobs")
TOP = 4
FUNCTIONS: dict[str, LossFn] = {
    "policy": policy,
    "pairs": pairs,
    "nll": likelihood,
    "soft": soft,
}


def needs_in(loss: str) -> Needs:
    return Needs(entropy=True, **{"top_k": TOP, "targets": True} if loss == "soft" else {})


def watched(loss: str, seen: Callable[[ForwardOutput, TokenBatch], None]) -> LossFn:

    def loss_fn(output: ForwardOutput, part: TokenBatch) -> LossOutput:
        seen(output, part)
        result = FUNCTIONS[loss](output, part)
        return LossOutput(
            result.loss,
            {**result.metrics, "tokens_seen": Sum((part.segment_ids > 0).sum().float())},
        )

    loss_fn.needs = needs_in(loss)  # type: ignore[attr-defined]
    return loss_fn

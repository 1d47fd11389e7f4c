"""What DPO compares: preferences as tokens, and the reference's logprobs of them."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.checks import warn
from nemorl.data.batch import Example, TokenBatch, round_up
from nemorl.data.comparisons import Together, collate_together, mismatched
from nemorl.data.packing import num_segments
from nemorl.data.preferences import labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.statistics import Lengths
from nemorl.losses import (
    LossOutput,
    nll,
    preference,
    sequence_logprobs,
    sequence_mean_weights,
    token_mean_weights,
)
from nemorl.parallel.backend import ForwardOutput, LossFn, TrainingBackend
from nemorl.runtime.algorithms.sft import in_chunks
from nemorl.runtime.config import offline
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.run.data import within_limit
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.samples import Samples, spread
from nemorl.runtime.watch.log import waiting

if TYPE_CHECKING:  # a small backend lacks methods, and raises AttributeError for them
    from nemorl.parallel.backend import FullTrainingBackend


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """Rows of a batch: (chosen, rejected), or for KTO one response labelled by its advantages."""

    rows: Sequence[Together]
    mismatched: Sequence[Together] = ()
    """For KTO's baseline: per row its prompt with another row's response."""
    in_pairs: bool = True
    """Whether the responses, counted through all rows, alternate between chosen and rejected."""


def comparisons(
    config: offline.DPOConfig, rows: Sequence[Any], tokenizer: Any, *, in_pairs: bool = False
) -> tuple[Comparisons, Sequence[Any], Lengths]:
    """Return preferences as tokens, the row of each, and their lengths. KTO takes pairs apart; with
    `in_pairs` their responses stay next to each other.
    """
    single = isinstance(config.loss, offline.KTOLoss)
    paired = not single or (in_pairs and all(row.get("label") is None for row in rows))
    if paired:
        what = "responses" if single else "pairs"
        found, kept, lengths = pairs_of(config, rows, tokenizer, what=what)
        if single:  # a row each, because the limits on a row's size are for one response
            halves = ((with_label(a, True), with_label(b, False)) for a, b in found)
            found = [(half,) for pair in halves for half in pair]
    else:
        judged, kept, lengths = within_limit(
            "responses", config, labelled_rows(rows), to_labelled(rows, tokenizer)
        )
        found = [(with_label(example, desirable),) for example, desirable in judged]
    examples = [example for row in found for example in row]
    others: list[Together] = []
    if isinstance(config.loss, offline.KTOLoss) and config.loss.baseline == "mismatched":
        limit, seed = config.data.max_total_sequence_length, config.run.seed
        others = [(other,) for other in mismatched(examples, max_length=limit, seed=seed)]
    lengths = replace(lengths, tokens=[example.num_tokens for example in examples])
    return Comparisons(rows=found, mismatched=others, in_pairs=paired), kept, lengths


def pairs_of(
    config: BaseConfig, rows: Sequence[Any], tokenizer: Any, *, what: str = "pairs"
) -> tuple[list[Together], Sequence[Any], Lengths]:
    """Return pairs, (chosen, rejected), as tokens, the row of each, and the lengths of `what`."""
    pairs, kept, lengths = within_limit(what, config, pair_rows(rows), to_pairs(rows, tokenizer))
    alike = sum(pair.chosen.input_ids == pair.rejected.input_ids for pair in pairs)
    if alike:
        warn(f"{alike} of {len(pairs)} pairs have the same response on both sides: remove them")
    return [(pair.chosen, pair.rejected) for pair in pairs], kept, lengths


def with_label(example: Example, desirable: bool) -> Example:
    """Label an example by the sign of its advantages."""
    sign = 1.0 if desirable else -1.0
    return replace(example, advantages=[sign * trained for trained in example.loss_mask])


def with_reference_logprobs(
    trainer: TrainingBackend, data: Comparisons, config: offline.DPOConfig
) -> Comparisons:
    """Add the present model's logprobs, in float32."""
    size = config.train_global_batch_size

    def computed(rows: Sequence[Together]) -> list[Together]:
        result: list[Together] = []
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            values = trainer.get_logprobs(collate_together(part)).values
            for row, logprobs in zip(part, values, strict=True):
                lengths = [example.num_tokens for example in row]
                pieces = logprobs[: sum(lengths)].float().split(lengths)
                result.append(
                    tuple(
                        replace(e, reference_logprobs=array("f", piece.tolist()))
                        for e, piece in zip(row, pieces, strict=True)
                    )
                )
        return result

    with waiting("computing the reference's logprobs", quiet=config.run.display == "none"):
        return replace(data, rows=computed(data.rows), mismatched=computed(data.mismatched))


def with_reference(
    trainer: "FullTrainingBackend", rows: Sequence[Together], config: offline.DPOConfig
) -> TokenBatch:
    """Return rows as a batch, with the reference's logprobs if needed."""
    batch, size = collate_together(rows), config.train_global_batch_size
    if not config.needs_reference or batch.reference_logprobs is not None:
        return batch
    values = in_chunks(trainer.get_reference_logprobs, batch, rows=size)
    return replace(batch, reference_logprobs=values)


def baseline(
    trainer: "FullTrainingBackend", rows: Sequence[Together], config: offline.DPOConfig
) -> float:
    """Return KTO's baseline, the mean of log π − log π_ref over mismatched sequences, which
    estimates KL(π‖π_ref) in nats per response.
    """
    batch = with_reference(trainer, rows, config)
    assert batch.reference_logprobs is not None
    size = config.train_global_batch_size
    difference = in_chunks(trainer.get_logprobs, batch, rows=size) - batch.reference_logprobs
    return float(torch.where(batch.loss_mask, difference, 0.0).sum()) / sum(map(len, rows))


def samples(
    run: Run[BaseConfig],
    examples: Sequence[Example],
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
) -> Samples:
    """Return evenly spaced pairs as rows of the sample log."""
    found: Samples = []
    for i in spread(len(chosen), run.config.run.samples_per_step):
        texts = []
        for example in examples[2 * i : 2 * i + 2]:
            ids, begin = list(example.input_ids), list(example.loss_mask).index(True)
            texts.append([run.tokenizer.decode(part) for part in (ids[:begin], ids[begin:])])
        found.append(
            {
                "prompt": texts[0][0],
                "chosen": texts[0][1],
                "rejected": texts[1][1],
                "chosen_reward": float(chosen[i]),
                "rejected_reward": float(rejected[i]),
                "margin": float(chosen[i] - rejected[i]),
            }
        )
    return found


def make_loss(config: offline.DPOConfig, batch: TokenBatch, kl: float | None = None) -> LossFn:
    """Return the configured loss of a part of the step whose whole batch is `batch`.

    A row is a pair, segment 1 chosen and segment 2 rejected, or for KTO a response labelled by the
    sign of `advantages`; each weighs 1 / their number. kl: KTO's baseline.
    """
    single, settings = isinstance(config.loss, offline.KTOLoss), asdict(config.loss)
    function = getattr(preference, settings.pop("name"))
    others = ("average_logprobs", "baseline")
    return partial(
        preference_loss,
        term=partial(function, **{k: v for k, v in settings.items() if k not in others}),
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

    Each pair (`single`: labelled response) weighs `weight`; a response's score is the sum of its
    tokens' logprobs, with `average` their mean.
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


def with_loss_weights(batch: TokenBatch, config: offline.DPOConfig) -> TokenBatch:
    """Add weights of the likelihood term."""
    if isinstance(config.loss, offline.KTOLoss):
        assert batch.advantages is not None
        mask = batch.loss_mask & (batch.advantages > 0)
    else:
        counts = trained(batch, single=False)[:, None]
        mask = batch.loss_mask & (batch.segment_ids == 1) & counts
    if config.sft_reduction == "token_mean":
        return replace(batch, loss_weights=token_mean_weights(mask))
    return replace(batch, loss_weights=sequence_mean_weights(mask, batch.segment_ids))


def rewards(
    loss: offline.PreferenceLossConfig, token_logprobs: Float[Tensor, "batch seq"], part: TokenBatch
) -> Float[Tensor, "sequences"]:
    """Return the implicit reward of every response: β(log π − log π_ref), or of DPO's divergence;
    without a reference β·log π (orpo: coef·log π).
    """
    average = averages(loss)
    difference = by_sequence(token_logprobs, part, average=average)
    if part.reference_logprobs is not None:
        difference = difference - by_sequence(part.reference_logprobs, part, average=average)
    if isinstance(loss, offline.DPOLoss):
        difference = preference.implicit_reward(difference, divergence=loss.divergence)
    return (loss.coef if isinstance(loss, offline.ORPOLoss) else loss.beta) * difference


def averages(loss: offline.PreferenceLossConfig) -> bool:
    """Return whether scores are means of logprobs."""
    if isinstance(loss, offline.SimPOLoss | offline.ORPOLoss):
        return True
    return not isinstance(loss, offline.KTOLoss) and loss.average_logprobs


def trained(part: TokenBatch, *, single: bool, num: int | None = None) -> Bool[Tensor, "items"]:
    """Return which pairs (`single`: responses) are trained on."""
    found = by_sequence(part.loss_mask.float(), part, num=num) > 0
    return found if single else found[0::2] & found[1::2]


def by_sequence(
    values: Float[Tensor, "batch seq"],
    part: TokenBatch,
    *,
    average: bool = False,
    num: int | None = None,
) -> Float[Tensor, "sequences"]:
    """Return the sum or mean over each response's trained tokens, with zeros up to `num` (None: as
    many as there are, for which the host waits).
    """
    count = int(num_segments(part.segment_ids).sum()) if num is None else num
    return sequence_logprobs(
        values, part.loss_mask, part.segment_ids, num_sequences=count, average=average
    )

"""What DPO compares: preferences as tokens, and the reference's logprobs of them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.data.batch import Example, TokenBatch
from nemorl.data.comparisons import Together, collate_together, mismatched
from nemorl.data.preferences import labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.statistics import Lengths
from nemorl.parallel.backend import TrainingBackend
from nemorl.runtime.algorithms.common import in_chunks
from nemorl.runtime.config.dpo import DPOConfig, KTOLoss
from nemorl.runtime.run.data import within_limit
from nemorl.runtime.run.loop import OpenRun
from nemorl.runtime.run.samples import Samples, spread
from nemorl.runtime.watch.waiting import waiting
from nemorl.warn import warn


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """What is compared, as rows of a batch: (chosen, rejected), or for KTO one response labelled by
    its advantages.
    """

    rows: Sequence[Together]
    mismatched: Sequence[Together] = ()
    """For KTO's baseline: per row its prompt with another row's response."""
    in_pairs: bool = True
    """Whether the responses, counted through all rows, alternate between chosen and rejected."""


def comparisons(
    config: DPOConfig, rows: Sequence[Any], tokenizer: Any, *, in_pairs: bool = False
) -> tuple[Comparisons, Sequence[Any], Lengths]:
    """Return preferences as tokens, the row of each, and their lengths.

    KTO takes pairs apart; with `in_pairs` the two responses stay next to each other.
    """
    single = isinstance(config.loss, KTOLoss)
    paired = not single or (in_pairs and all(row.get("label") is None for row in rows))
    if paired:
        what = "responses" if single else "pairs"
        pairs, kept, lengths = within_limit(
            what, config, pair_rows(rows), to_pairs(rows, tokenizer)
        )
        alike = sum(pair.chosen.input_ids == pair.rejected.input_ids for pair in pairs)
        if alike:
            warn(
                f"{alike} of {len(pairs)} pairs have the same response on both sides, which teaches"
                " nothing: remove them"
            )
        found: list[Together] = [(pair.chosen, pair.rejected) for pair in pairs]
        if single:  # a row each, because the limits on a row's size are for one response
            halves = ((with_label(a, True), with_label(b, False)) for a, b in found)
            found = [(half,) for pair in halves for half in pair]
    else:
        judged, kept, lengths = within_limit(
            "responses", config, labelled_rows(rows), to_labelled(rows, tokenizer)
        )
        found = [(with_label(example, desirable),) for example, desirable in judged]
        if not in_pairs and len({desirable for _, desirable in judged}) == 1:
            warn(
                f"all responses are {'desirable' if judged[0][1] else 'undesirable'}, so kto has"
                " nothing to compare them with: add some of the other kind"
            )
    examples = [example for row in found for example in row]
    others: list[Together] = []
    if isinstance(config.loss, KTOLoss) and config.loss.baseline == "mismatched":
        limit, seed = config.data.max_total_sequence_length, config.run.seed
        others = [(other,) for other in mismatched(examples, max_length=limit, seed=seed)]
    lengths = replace(lengths, tokens=[example.num_tokens for example in examples])
    return Comparisons(rows=found, mismatched=others, in_pairs=paired), kept, lengths


def with_label(example: Example, desirable: bool) -> Example:
    """Label an example by the sign of its advantages."""
    sign = 1.0 if desirable else -1.0
    return replace(example, advantages=[sign * trained for trained in example.loss_mask])


def with_reference_logprobs(
    trainer: TrainingBackend, data: Comparisons, config: DPOConfig
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


def with_reference(trainer: Any, batch: TokenBatch, config: DPOConfig) -> TokenBatch:
    """Add the reference's logprobs, if needed."""
    if not config.needs_reference or batch.reference_logprobs is not None:
        return batch
    compute, rows = trainer.get_reference_logprobs, config.train_global_batch_size
    return replace(batch, reference_logprobs=in_chunks(compute, batch, rows=rows))


def baseline(trainer: Any, rows: Sequence[Together], config: DPOConfig) -> float:
    """Return KTO's baseline, an estimate of KL(π‖π_ref) in nats per response: the mean of
    log π − log π_ref over mismatched sequences.
    """
    batch = with_reference(trainer, collate_together(rows), config)
    assert batch.reference_logprobs is not None
    size = config.train_global_batch_size
    difference = in_chunks(trainer.get_logprobs, batch, rows=size) - batch.reference_logprobs
    return float(torch.where(batch.loss_mask, difference, 0.0).sum()) / sum(map(len, rows))


def samples(
    run: OpenRun,
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

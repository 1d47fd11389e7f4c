"""Learning from preferences, without sampling: DPO and its relatives."""

import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.data.batch import Example, TokenBatch
from nemorl.data.comparisons import Together, collate_together, mismatched
from nemorl.data.lengths import limit_length
from nemorl.data.order import RowOrder
from nemorl.data.preferences import labelled_rows, pair_rows, to_labelled, to_pairs
from nemorl.data.sharding import merge, split, split_microbatches
from nemorl.data.statistics import Lengths
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.common import Samples, Validate, loop, row_order, warn_of_cuts
from nemorl.runtime.algorithms.preference_loss import make_loss, rewards, with_loss_weights
from nemorl.runtime.config.preference import DPOConfig, KTOLoss
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.job import Inputs, Job
from nemorl.runtime.run.state import Run


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """What is compared, as rows of a batch: (chosen, rejected), or for KTO a response labelled by
    its advantages.
    """

    rows: Sequence[Together]
    mismatched: Sequence[Together] = ()
    """For KTO: per row a sequence with the same prompt and another row's response, which the
    baseline is measured on.
    """
    in_pairs: bool = True
    """Whether the responses, counted through all rows, are chosen and rejected ones in turn; for
    KTO, where they needn't be, each has its own row.
    """


def prepare(config: DPOConfig, inputs: Inputs) -> Job:
    """The preferences as tokens; validation is the same loss, and how often the chosen response has
    the higher reward, on held-out ones.
    """
    train, kept, lengths = comparisons(config, inputs.train, inputs.tokenizer)
    held_out, _, held_out_lengths = comparisons(
        config, inputs.validation, inputs.tokenizer, in_pairs=True
    )
    return job(
        config,
        row_order(config, kept),
        train,
        held_out,
        {"train": lengths, "validation": held_out_lengths},
    )


def job(
    config: DPOConfig,
    order: RowOrder,
    train: Comparisons,
    held_out: Comparisons,
    lengths: Mapping[str, Lengths],
) -> Job:
    """The job on data as they are; with a precomputed reference, one that becomes the job on data
    with its logprobs.
    """

    def with_initial_model(run: Run) -> Job:
        return job(
            config,
            order,
            with_reference_logprobs(run, train),
            with_reference_logprobs(run, held_out),
            lengths,
        )

    return Job(
        run=partial(
            run,
            data=train,
            order=order,
            validate=partial(validate, data=held_out) if held_out.rows else None,
        ),
        num_steps=num_steps(config, order.num_rows),
        keep_reference=config.needs_reference and config.reference == "live",
        with_initial_model=with_initial_model if config.reference == "precomputed" else None,
        lengths=lengths,
    )


def run(
    run: Run,
    data: Comparisons,
    order: RowOrder,
    *,
    validate: Validate | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train until `max_num_steps`, or for `num_epochs` passes over the data; returns the run as it
    stands then.
    """
    step, last_step = (
        partial(train_step, data=data, order=order),
        num_steps(run.config, order.num_rows),
    )
    return loop(
        run,
        step,
        last_step=last_step,
        num_rows=order.num_rows,
        validate=validate,
        callbacks=callbacks,
    )


def train_step(
    run: Run, *, data: Comparisons, order: RowOrder
) -> tuple[Run, dict[str, float], Samples]:
    """The next rows of the order, compared with the reference, as one optimizer step."""
    config, start = run.config, time.perf_counter()
    rows = order.take(run.state.cursor, config.train_global_batch_size)
    batch = with_loss_weights(
        with_reference(run, collate_together([data.rows[i] for i in rows])), config
    )
    kl = baseline(run, [data.mismatched[i] for i in rows]) if data.mismatched else None
    compared = time.perf_counter()
    metrics = finalize(run.trainer.train_step(batch, make_loss(config, batch, kl)))
    run = replace(run, state=run.state.advance(rows=len(rows)))
    now = time.perf_counter()
    more = {} if kl is None else {"kl_baseline": float(kl)}
    timing = {
        "seconds": now - start,
        "seconds_reference": compared - start,
        "seconds_train": now - compared,
    }
    return (
        run,
        {**metrics, **more, **timing, "tokens_per_second": batch.num_tokens / (now - start)},
        [],
    )


def validate(run: Run, *, data: Comparisons) -> tuple[dict[str, float], Samples]:
    """The loss over all of the data with its metrics; where it comes in pairs, some of them for the
    sample log.
    """
    config = run.config
    batch = with_loss_weights(with_reference(run, collate_together(data.rows)), config)
    logprobs = in_chunks(run.trainer.get_logprobs, batch, rows=config.train_global_batch_size)
    kl = baseline(run, data.mismatched) if data.mismatched else None
    output = make_loss(config, batch, kl)(
        ForwardOutput(logprobs, torch.zeros_like(logprobs)), batch
    )
    metrics = {
        name: value for name, value in finalize(output.metrics).items() if name != "entropy"
    }  # get_logprobs gives none
    metrics["loss"] = float(output.loss)
    if not data.in_pairs:
        return metrics, []
    chosen, rejected = rewards(config.loss, logprobs, batch).unflatten(0, (-1, 2)).unbind(-1)
    metrics |= {
        "accuracy": float((chosen > rejected).float().mean()),
        "margin": float((chosen - rejected).mean()),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }
    return metrics, samples(
        run, [example for row in data.rows for example in row], chosen, rejected
    )


def samples(
    run: Run,
    examples: Sequence[Example],
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
) -> Samples:
    """Pairs from all over the data as rows of the sample log, with their implicit rewards;
    `examples` are chosen and rejected ones in turn.
    """
    count = min(run.config.run.samples_per_step, len(chosen))
    found: Samples = []
    for i in (place * len(chosen) // count for place in range(count)):
        texts = [
            [run.tokenizer.decode(list(ids)) for ids in halves(example)]
            for example in examples[2 * i : 2 * i + 2]
        ]
        values = {
            "chosen_reward": float(chosen[i]),
            "rejected_reward": float(rejected[i]),
            "margin": float(chosen[i] - rejected[i]),
        }
        found.append(
            {"prompt": texts[0][0], "chosen": texts[0][1], "rejected": texts[1][1], **values}
        )
    return found


def halves(example: Example) -> tuple[Sequence[int], Sequence[int]]:
    """The token ids of the prompt and of the response, which begins with the first token that is
    trained on.
    """
    begin = list(example.loss_mask).index(True)
    return example.input_ids[:begin], example.input_ids[begin:]


def with_reference(run: Run, batch: TokenBatch) -> TokenBatch:
    """The batch with the reference's logprobs, if the loss compares with one and the data don't
    bring them.
    """
    if not run.config.needs_reference or batch.reference_logprobs is not None:
        return batch
    logprobs = in_chunks(
        run.trainer.get_reference_logprobs, batch, rows=run.config.train_global_batch_size
    )
    return replace(batch, reference_logprobs=logprobs)


def baseline(run: Run, rows: Sequence[Together]) -> Float[Tensor, ""]:
    """KTO's: the mean over mismatched sequences of log π − log π_ref, an estimate of KL(π‖π_ref) in
    nats per response.
    """
    batch = with_reference(run, collate_together(rows))
    assert batch.reference_logprobs is not None
    difference = (
        in_chunks(run.trainer.get_logprobs, batch, rows=run.config.train_global_batch_size)
        - batch.reference_logprobs
    )
    return torch.where(batch.loss_mask, difference, 0.0).sum() / sum(len(row) for row in rows)


def with_reference_logprobs(run: Run, data: Comparisons) -> Comparisons:
    """The data with the logprobs of the model as it is now, in float32: what `reference="precomputed"` compares with."""
    from rich.console import Console
    from rich.progress import track

    console = Console()
    silent = run.config.run.display == "none" or not console.is_terminal

    def computed(rows: Sequence[Together]) -> list[Together]:
        size, result = run.config.train_global_batch_size, []
        starts = range(0, len(rows), size)
        for first in track(
            starts,
            description="reference logprobs",
            console=console,
            transient=True,
            disable=silent,
        ):
            part = rows[first : first + size]
            values = run.trainer.get_logprobs(collate_together(part)).values
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

    return replace(data, rows=computed(data.rows), mismatched=computed(data.mismatched))


def in_chunks(
    compute: Callable[[TokenBatch], Logprobs], batch: TokenBatch, *, rows: int
) -> Float[Tensor, "batch seq"]:
    """A model's logprobs of a batch of any size (as wide as its longest row), `rows` rows at a
    time, in the batch's layout.
    """
    plan = split_microbatches(batch, rows=rows)
    return merge([compute(part).values for part in split(batch, plan)], plan)


def comparisons(
    config: DPOConfig, rows: Sequence[Any], tokenizer: Any, *, in_pairs: bool = False
) -> tuple[Comparisons, list[Any], Lengths]:
    """Preferences as tokens, the row that each came from, and how long the sequences are;
    `data.too_long` says what happens to those over the limit.

    KTO takes the responses apart; with `in_pairs` those that come as pairs stay next to each other,
    so that the two can be compared.
    """
    length, policy = config.data.max_total_sequence_length, config.data.too_long
    single = isinstance(config.loss, KTOLoss)
    paired = not single or (in_pairs and all(row.get("label") is None for row in rows))
    if not paired:
        sources = labelled_rows(rows)
        judged, report = limit_length(
            to_labelled(rows, tokenizer), max_length=length, policy=policy, rows=sources
        )
        found: list[Together] = [(with_label(example, desirable),) for example, desirable in judged]
        if not in_pairs and len({desirable for _, desirable in judged}) == 1:
            warnings.warn(
                f"all responses are {'desirable' if judged[0][1] else 'undesirable'}, so kto has"
                " nothing to compare them with: add some of the other kind",
                stacklevel=2,
            )
    else:
        sources = pair_rows(rows)
        pairs, report = limit_length(
            to_pairs(rows, tokenizer), max_length=length, policy=policy, rows=sources
        )
        found = [(pair.chosen, pair.rejected) for pair in pairs]
        alike = sum(pair.chosen.input_ids == pair.rejected.input_ids for pair in pairs)
        if alike:
            warnings.warn(
                f"{alike} of {len(pairs)} pairs have the same response on both sides, which teaches"
                " nothing: leave them out",
                stacklevel=2,
            )
        if single:  # a row each, because the limits on a row's size are for one response
            found = [
                (half,)
                for pair in pairs
                for half in (with_label(pair.chosen, True), with_label(pair.rejected, False))
            ]
    warn_of_cuts("responses" if single else "pairs", report)
    kept = [sources[i] for i in report.kept]
    counts = [example.num_tokens for row in found for example in row]
    lengths = Lengths(
        tokens=counts,
        limit=length,
        num_truncated=report.num_truncated,
        num_dropped=report.num_dropped,
    )
    if not (isinstance(config.loss, KTOLoss) and config.loss.baseline == "mismatched"):
        return Comparisons(rows=found, in_pairs=paired), kept, lengths
    others = mismatched(
        [example for row in found for example in row], max_length=length, seed=config.run.seed
    )
    return (
        Comparisons(rows=found, mismatched=[(other,) for other in others], in_pairs=paired),
        kept,
        lengths,
    )


def with_label(example: Example, desirable: bool) -> Example:
    """KTO's labels are the signs of the advantages."""
    return replace(
        example,
        advantages=[(1.0 if desirable else -1.0) * trained for trained in example.loss_mask],
    )


def num_steps(config: DPOConfig, num_rows: int) -> int:
    """Optimizer steps of the whole run."""
    return config.max_num_steps or max(
        1, config.num_epochs * num_rows // config.train_global_batch_size
    )

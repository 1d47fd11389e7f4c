"""Supervised fine-tuning: raise the probability of the demonstrations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.datasets import to_examples
from nemorl.data.order import RowOrder
from nemorl.data.rows import origin_of
from nemorl.data.statistics import Lengths
from nemorl.losses.masked import mean_of
from nemorl.losses.masks import sequence_mean_weights, token_mean_weights
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, finalize, merge
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.common import (
    Samples,
    Stopwatch,
    answering,
    in_chunks,
    loop,
    num_steps,
    row_order,
    tokenised_prompts,
    within_limit,
)
from nemorl.runtime.config.sft import SFTConfig
from nemorl.runtime.run.job import Inputs, Job
from nemorl.runtime.run.state import Run


def prepare(config: SFTConfig, inputs: Inputs) -> Job:
    """Return the job of training on the demonstrations of `inputs`.

    It validates what the rows allow: the loss on demonstrations, and greedy answers.
    """

    def tokenised(rows: Sequence[Any]) -> tuple[list[Example], list[Any], Lengths]:
        return within_limit("examples", config, rows, to_examples(rows, inputs.tokenizer))

    examples, rows, lengths = tokenised(inputs.train)
    demonstrations = [
        row
        for row in inputs.validation
        if row.get("messages") is not None or row.get("response") is not None
    ]
    held_out, _, held_out_lengths = tokenised(demonstrations)
    with_answer = [row for row in inputs.validation if row.get("answer") is not None]
    questions, _ = tokenised_prompts(config, with_answer, inputs.tokenizer)
    answer = answering(config, inputs.environment, questions)

    if inputs.validation and not held_out and not questions:
        first, columns = origin_of(inputs.validation[0], 0), ", ".join(inputs.validation[0])
        raise ValueError(
            "data.validation must have rows with a response, messages or an answer, but"
            f" {first} has the columns {columns}: name them (data.response_column,"
            " data.answer_column)"
        )

    def validate(run: Run) -> tuple[dict[str, float], Samples]:
        metrics = {"loss": validation_loss(run, held_out)} if held_out else {}
        answered, samples = answer(run) if answer else ({}, [])
        return metrics | answered, samples

    order, last_step = row_order(config, rows), num_steps(config, len(examples))
    return Job(
        run=partial(
            loop,
            step=partial(train_step, examples=examples, order=order),
            last_step=last_step,
            num_rows=order.num_rows,
            validate=validate if held_out or answer else None,
        ),
        num_steps=last_step,
        generates=answer is not None,
        lengths={"train": lengths, "validation": held_out_lengths},
    )


def train_step(
    run: Run, *, examples: Sequence[Example], order: RowOrder
) -> tuple[Run, dict[str, float], Samples]:
    """Make one optimizer step on the next rows of the seeded order."""
    config, state, watch = run.config, run.state, Stopwatch()
    if run.generator is not None:
        run.generator.sleep()  # the trainer needs its memory between validations
    rows = order.take(state.cursor, config.train_global_batch_size)
    batch = with_loss_weights(collate([examples[i] for i in rows]), config)
    metrics = finalize(run.trainer.train_step(batch, loss_fn))
    run = replace(run, state=state.advance(rows=len(rows)))
    return run, metrics | watch.metrics(batch.num_tokens), []


def loss_fn(output: ForwardOutput, batch: TokenBatch) -> LossOutput:
    """Return the negative log-likelihood of a part of a batch."""
    assert batch.loss_weights is not None
    result = nll(output.token_logprobs, batch.loss_weights)
    entropy = {"entropy": mean_of(output.entropy, batch.loss_weights != 0)}
    return replace(result, metrics=merge(result.metrics, entropy))


def with_loss_weights(batch: TokenBatch, config: SFTConfig) -> TokenBatch:
    """Return the batch with weights as `reduction` says."""
    build = token_mean_weights if config.reduction == "token_mean" else sequence_mean_weights
    return replace(batch, loss_weights=build(batch.loss_mask))


def validation_loss(run: Run, examples: Sequence[Example]) -> float:
    """Return the mean negative log-likelihood per trained token, in nats."""
    batch, rows = collate(examples), run.config.train_global_batch_size
    logprobs = in_chunks(run.trainer.get_logprobs, batch, rows=rows)
    return -float(logprobs[batch.loss_mask].double().mean())

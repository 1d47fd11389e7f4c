"""Supervised fine-tuning: raise the probability of the demonstrations."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.order import RowOrder
from nemorl.data.rows import origin_of
from nemorl.losses.masked import mean_of
from nemorl.losses.masks import sequence_mean_weights, token_mean_weights
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, finalize, merge
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.common import (
    Samples,
    Validate,
    answering,
    loop,
    row_order,
    tokenised_examples,
    tokenised_prompts,
)
from nemorl.runtime.config.base import SFTConfig
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.job import Inputs, Job
from nemorl.runtime.run.state import Run


def prepare(config: SFTConfig, inputs: Inputs) -> Job:
    """The demonstrations as tokens.

    Validated is what the rows allow: the loss on demonstrations, and greedy answers where there is
    an answer.
    """
    rows, examples, lengths = tokenised_examples(config, inputs.train, inputs.tokenizer)
    order = row_order(config, rows)
    demonstrations = [
        row
        for row in inputs.validation
        if row.get("messages") is not None or row.get("response") is not None
    ]
    _, held_out, held_out_lengths = tokenised_examples(config, demonstrations, inputs.tokenizer)
    questions, _ = tokenised_prompts(
        config,
        [row for row in inputs.validation if row.get("answer") is not None],
        inputs.tokenizer,
    )
    answer = answering(config, inputs.environment, questions)

    if inputs.validation and not held_out and not questions:
        first, columns = origin_of(inputs.validation[0], 0), ", ".join(inputs.validation[0])
        raise ValueError(
            "data.validation must have rows with a response or messages, or with an answer, but"
            f" {first} has the columns {columns}: name them (data.response_column,"
            " data.answer_column)"
        )

    def validate(run: Run) -> tuple[dict[str, float], Samples]:
        metrics = {"loss": validation_loss(run, held_out, batch_size=256)} if held_out else {}
        answered, samples = answer(run) if answer else ({}, [])
        return metrics | answered, samples

    return Job(
        run=partial(
            run, examples=examples, order=order, validate=validate if held_out or answer else None
        ),
        num_steps=num_steps(config, len(examples)),
        generates=answer is not None,
        lengths={"train": lengths, "validation": held_out_lengths},
    )


def run(
    run: Run,
    examples: Sequence[Example],
    order: RowOrder,
    *,
    validate: Validate | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train until `max_num_steps`, or for `num_epochs` passes over the examples; returns the run as
    it stands then.
    """
    last_step = num_steps(run.config, len(examples))
    step = partial(train_step, examples=examples, order=order)
    return loop(
        run,
        step,
        last_step=last_step,
        num_rows=order.num_rows,
        validate=validate,
        callbacks=callbacks,
    )


def train_step(
    run: Run, *, examples: Sequence[Example], order: RowOrder
) -> tuple[Run, dict[str, float], Samples]:
    """The next rows of the seeded order, as one optimizer step."""
    config, state, start = run.config, run.state, time.perf_counter()
    if run.generator is not None:
        run.generator.sleep()  # its memory is the trainer's between validations
    count = config.train_global_batch_size
    batch = with_loss_weights(
        collate([examples[i] for i in order.take(state.cursor, count)]), config
    )
    metrics = finalize(run.trainer.train_step(batch, loss_fn))
    run = replace(run, state=state.advance(rows=count))
    seconds = time.perf_counter() - start
    return run, {**metrics, "seconds": seconds, "tokens_per_second": batch.num_tokens / seconds}, []


def loss_fn(output: ForwardOutput, batch: TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    result = nll(output.token_logprobs, batch.loss_weights)
    return replace(
        result,
        metrics=merge(
            result.metrics, {"entropy": mean_of(output.entropy, batch.loss_weights != 0)}
        ),
    )


def with_loss_weights(batch: TokenBatch, config: SFTConfig) -> TokenBatch:
    build = token_mean_weights if config.reduction == "token_mean" else sequence_mean_weights
    return replace(batch, loss_weights=build(batch.loss_mask))


def num_steps(config: SFTConfig, num_examples: int) -> int:
    """Optimizer steps of the whole run."""
    return config.max_num_steps or max(
        1, config.num_epochs * num_examples // config.train_global_batch_size
    )


def validation_loss(run: Run, examples: Sequence[Example], *, batch_size: int) -> float:
    """Mean negative log-likelihood per trained token, in nats."""
    total = count = 0.0
    for first in range(0, len(examples), batch_size):
        batch = collate(examples[first : first + batch_size])
        logprobs = run.trainer.get_logprobs(batch).values
        total -= float(logprobs[batch.loss_mask].double().sum())
        count += int(batch.loss_mask.sum())
    return total / max(1.0, count)

"""Supervised fine-tuning: raise the probability of the demonstrations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.data.datasets import to_examples
from nemorl.data.packing import merge, split, split_microbatches
from nemorl.data.rows import origin_of
from nemorl.losses import Logprobs, LossOutput, nll, sequence_mean_weights, token_mean_weights
from nemorl.parallel.backend import ForwardOutput, TrainingBackend
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.offline import SFTConfig
from nemorl.runtime.run.data import within_limit
from nemorl.runtime.run.loop import Run, Validate
from nemorl.runtime.run.samples import Samples


def sft(run: Run[SFTConfig]) -> None:
    """Train on the demonstrations of `run.rows`."""
    config = run.config
    examples, rows = demonstrations(run, "train", run.rows)
    validate = validation(run)
    order = run.order(rows)
    weights = token_mean_weights if config.reduction == "token_mean" else sequence_mean_weights
    for step in run.steps(config.planned_steps(order.num_rows), validate=validate):
        batch = collate([examples[i] for i in order.next(config.train_global_batch_size)])
        batch = replace(batch, loss_weights=weights(batch.loss_mask))
        step.train(batch, partial(loss_fn, dynamic=config.loss == "dft"))


def demonstrations(
    run: Run[BaseConfig], name: str, rows: Sequence[Any]
) -> tuple[Sequence[Example], Sequence[Any]]:
    """Return demonstrations as tokens, and their rows."""
    items = to_examples(rows, run.tokenizer)
    found, kept, run.lengths[name] = within_limit("examples", run.config, rows, items)
    return found, kept


def validation(run: Run[SFTConfig]) -> Validate | None:
    """Return the validation that the rows allow."""
    rows = run.validation_rows
    shown = [
        row for row in rows if row.get("messages") is not None or row.get("response") is not None
    ]
    examples, _ = demonstrations(run, "validation", shown)
    answer = run.questions([row for row in rows if row.get("answer") is not None])
    if rows and not examples and not answer:
        first, columns = origin_of(rows[0], 0), ", ".join(rows[0])
        raise ValueError(
            "data.validation must have rows with a response, messages or an answer, but"
            f" {first} has {columns}: name them (data.response_column, data.answer_column)"
        )

    def validate() -> tuple[dict[str, float], Samples]:
        size = run.config.train_global_batch_size
        metrics = {"loss": validation_loss(run.trainer, examples, rows=size)} if examples else {}
        answered, samples = answer() if answer else ({}, [])
        return metrics | answered, samples

    return validate if rows else None


def loss_fn(output: ForwardOutput, batch: TokenBatch, *, dynamic: bool = False) -> LossOutput:
    """Return the negative log-likelihood, or that of dynamic fine-tuning."""
    assert batch.loss_weights is not None
    return nll(output.token_logprobs, batch.loss_weights, dynamic=dynamic)


def validation_loss(trainer: TrainingBackend, examples: Sequence[Example], *, rows: int) -> float:
    """Return the mean negative log-likelihood per trained token, in nats."""
    batch = collate(examples)
    logprobs = in_chunks(trainer.get_logprobs, batch, rows=rows)
    return -float(logprobs[batch.loss_mask].double().mean())


def in_chunks(
    compute: Callable[[TokenBatch], Logprobs | ForwardOutput], batch: TokenBatch, *, rows: int
) -> Float[Tensor, "batch seq"]:
    """Return logprobs or values of a batch, computed `rows` rows at a time."""
    plan = split_microbatches(batch, rows=rows)
    return merge([compute(part).values for part in split(batch, plan)], plan)

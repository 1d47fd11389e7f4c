"""Reward models: a score for each response, learned from preferences."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from nemorl.checks import is_number, require
from nemorl.data.batch import Example, TokenBatch, round_up
from nemorl.data.comparisons import Together, collate_together
from nemorl.data.rows import for_rows
from nemorl.losses import LossOutput, Needs, finalize, needs, preference
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.comparisons import by_sequence, pairs_of, samples
from nemorl.runtime.algorithms.sft import in_chunks
from nemorl.runtime.config.offline import RMConfig
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.samples import Samples

BINS = 5


def rm(run: Run[RMConfig]) -> None:
    """Train a model with a scalar head on the preferences of `run.rows`."""
    config = run.config
    train, rows = preferences(run, "train", run.rows)
    held_out, _ = preferences(run, "validation", run.validation_rows)
    set_padding(run.tokenizer, [example for pair in [*train, *held_out] for example in pair])
    order, loss_fn = run.order(rows), partial(pair_loss, centering=config.centering)
    validate = partial(validated, run, held_out) if held_out else None
    for step in run.steps(config.planned_steps(order.num_rows), validate=validate):
        pairs = [train[i] for i in order.next(config.train_global_batch_size)]
        step.train(to_batch(pairs), loss_fn)


def preferences(
    run: Run[RMConfig], name: str, rows: Sequence[Any]
) -> tuple[list[Together], Sequence[Any]]:
    """Return pairs as tokens, with their margins as advantages, and their rows."""
    pairs, kept, run.lengths[name] = pairs_of(run.config, rows, run.tokenizer)
    given = any(row.get("margin") is not None for row in kept)

    def margin(row: Any) -> float:
        value = row.get("margin") if given else 0.0
        require(
            is_number(value) and value >= 0,
            "margin",
            "must be a number, at least 0, in all rows or in none",
            value,
            "correct the row",
        )
        return float(value)

    margins = for_rows(kept, margin)
    return [
        tuple(replace(each, advantages=[margins[i]] * each.num_tokens) for each in pair)
        for i, pair in enumerate(pairs)
    ], kept


def set_padding(tokenizer: Any, examples: Sequence[Example]) -> None:
    """Make a tokenizer pad with a special token that ends no sequence: transformers scores the last
    other one. Raises: ValueError where there is none.
    """
    ends = {tokenizer.eos_token_id, *(example.input_ids[-1] for example in examples)}
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    free = [token for token in special if special[token] not in ends]
    must = "must have a special token that ends no sequence"
    require(bool(free), "model.tokenizer", must, [*special], "give it a pad_token")
    if tokenizer.pad_token not in free:
        tokenizer.pad_token = free[0]


def to_batch(pairs: Sequence[Together]) -> TokenBatch:
    """Return pairs as rows, each weighing 1 / their number. An extra token after each response
    holds its score: values are of the text before.
    """

    def scored(example: Example) -> Example:
        arrays = {name: [*values, values[-1]] for name, values in example.arrays().items()}
        mask = [False] * example.num_tokens + [True]
        return replace(example, **{**arrays, "loss_mask": mask, "response_mask": mask})

    batch = collate_together([tuple(map(scored, pair)) for pair in pairs])
    return replace(batch, loss_weights=batch.loss_mask / len(pairs))


@needs(values=True)
def pair_loss(output: ForwardOutput, part: TokenBatch, *, centering: float) -> LossOutput:
    """Return the Bradley-Terry loss of a part of a step."""
    assert part.loss_weights is not None and part.advantages is not None
    # As many as there can be, in pairs: to count them the host would wait for the device.
    of_each = partial(by_sequence, part=part, num=round_up(part.input_ids.numel(), 2))
    data = [*of_each(output.values).unflatten(0, (-1, 2)).unbind(-1)]
    data += [of_each(part.loss_weights)[0::2], of_each(part.advantages)[0::2]]
    return preference.bradley_terry(*data, centering=centering)


def validated(run: Run[RMConfig], pairs: Sequence[Together]) -> tuple[dict[str, float], Samples]:
    """Return metrics over all of the pairs, and some of them."""
    size, batch = run.config.train_global_batch_size, to_batch(pairs)
    values = in_chunks(partial(run.trainer.compute, needs=Needs(values=True)), batch, rows=size)
    output = pair_loss(ForwardOutput(values=values), batch, centering=run.config.centering)
    chosen, rejected = by_sequence(values, batch).unflatten(0, (-1, 2)).unbind(-1)
    metrics = finalize(output.metrics) | calibration_of(chosen - rejected)
    examples = [example for pair in pairs for example in pair]
    return {"loss": float(output.loss), **metrics}, samples(run, examples, chosen, rejected)


def calibration_of(margins: Float[Tensor, "pairs"]) -> dict[str, float]:
    """Return the expected calibration error of σ(|margin|), the probability that a pair's better
    score is the chosen one's, and its bins.

    >>> found = calibration_of(Tensor([2.0, -2.0, 0.0]))
    >>> found["calibration/0.8/right"], round(found["calibration_error"], 2)
    (0.5, 0.25)
    """
    predicted = margins.double().abs().sigmoid()
    right = 0.5 + 0.5 * margins.double().sign()
    bins = one_hot(((2 * predicted - 1) * BINS).long().clamp(max=BINS - 1), BINS).double()
    pairs, said, held = bins.sum(0), predicted @ bins, right @ bins
    found = {"calibration_error": float((said - held).abs().sum() / len(margins))}
    columns = {"pairs": pairs, "predicted": said / pairs, "right": held / pairs}
    for place in pairs.nonzero().flatten().tolist():
        name = f"calibration/{0.5 + place / 2 / BINS:.1f}"
        found |= {f"{name}/{key}": float(column[place]) for key, column in columns.items()}
    return found

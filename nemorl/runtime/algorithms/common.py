"""What the loops share: the way from step to step with validation and callbacks, rows as tokens,
validation by answering, and the sample log.
"""

import heapq
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemorl.checks import require
from nemorl.data.batch import Example, TokenBatch
from nemorl.data.datasets import to_examples, to_prompts
from nemorl.data.lengths import LengthReport, limit_length, num_tokens
from nemorl.data.order import RowOrder
from nemorl.data.statistics import Lengths
from nemorl.rollout.collect import Prompts, Rollouts, collect
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.runtime.run.callbacks import Callback, StopTraining, notify, notify_of_error
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.signals import update_in_progress
from nemorl.runtime.run.state import Run
from nemorl.runtime.run.weight_sync import sync_weights
from nemorl.runtime.watch.resources import ResourceMeter


def due(step: int, period: int, last_step: int) -> bool:
    """Every `period` steps (0: never) and at the last one.

    >>> [step for step in range(1, 8) if due(step, 3, 7)]
    [3, 6, 7]
    """
    return step == last_step or (period > 0 and step % period == 0)


Samples = list[dict[str, Any]]
Step = Callable[[Run], tuple[Run, dict[str, float], Samples]]
"""One step of an algorithm: the run after it, what was measured, and responses for the sample log.
"""
Validate = Callable[[Run], tuple[dict[str, float], Samples]]


def loop(
    run: Run,
    step: Step,
    *,
    last_step: int,
    num_rows: int,
    validate: Validate | None,
    callbacks: Sequence[Callback],
) -> Run:
    """Take steps until `last_step`, validate when it is due, and tell the callbacks; `StopTraining`
    from one ends it after the present step.

    An error anywhere in it is told to the callbacks' `on_exception`, with the run as it stands
    after its last whole step, and goes on its way. A signal that comes while
    a step changes the weights raises after the step.
    """
    metrics: dict[str, float] = {}
    meter = ResourceMeter()
    stop = False
    validated = run.state.step
    begun = -1

    def place() -> tuple[int, int]:
        return run.state.step, run.trainer.step

    def has_left(before: tuple[int, int]) -> bool:
        return place() != before

    def tell(hook: str, *args: Any) -> None:
        nonlocal stop
        try:
            notify(callbacks, hook, *args)
        except StopTraining:
            stop = True

    def record(samples: Samples) -> None:
        try:
            if samples:
                tell("on_samples", run, run.state.step, samples)
        finally:  # last, so that a checkpoint covers everything that was written before it
            tell("on_step_end", run, run.state.step, metrics)

    def report_validation() -> Samples:
        nonlocal validated
        assert validate is not None
        found, answers = validate(run)
        validated = run.state.step
        tell("on_validation_end", run, run.state.step, found)
        return answers

    try:
        tell("on_train_begin", run)
        at_start = (
            run.config.run.val_at_start
            if run.state.step == 0
            else misses_validation(run, last_step)
        )
        if validate and at_start:
            report_validation()
        while run.state.step < last_step and not stop:
            epoch = run.state.epoch(num_rows)
            if epoch != begun:
                tell("on_epoch_begin", run, epoch)
                begun = epoch
            tell("on_step_begin", run, run.state.step + 1)
            before = run
            samples: Samples = []
            try:
                with update_in_progress(partial(has_left, place())):
                    run, measured, samples = step(run)
                    metrics = measured | meter.read()
                if validate and due(run.state.step, run.config.run.val_period, last_step):
                    answers = report_validation()
                    samples = samples or answers
            finally:  # a whole step is recorded, though a signal or the validation ends the run
                if run is not before:
                    with update_in_progress():
                        record(samples)
            for passed in range(epoch, run.state.epoch(num_rows)):
                if passed != epoch:
                    tell("on_epoch_begin", run, passed)
                tell("on_epoch_end", run, passed, metrics)
        if validate and stop and run.state.step != validated:
            report_validation()  # a run that ends early is validated at its end like any other
        tell("on_train_end", run, metrics)
    except BaseException as error:
        notify_of_error(callbacks, run, error)
        raise
    return run


def misses_validation(run: Run, last_step: int) -> bool:
    """Whether the step that a run is resumed after should have been validated, but is not, because
    the validation failed.
    """
    if run.directory is None or not due(run.state.step, run.config.run.val_period, last_step):
        return False
    lines = RunDirectory(run.directory).read_metrics()
    return not any(
        line.get("step") == run.state.step and line.get("phase") == "validation" for line in lines
    )


def tokenised_prompts(config: Any, rows: Sequence[Any], tokenizer: Any) -> tuple[Prompts, Lengths]:
    """The rows' prompts as token ids that leave room for a response of `generation.max_new_tokens`;
    `data.too_long` says what happens to others.
    """
    longest, answer = config.data.max_total_sequence_length, config.generation.longest_response
    remedy = (
        f"data.max_total_sequence_length is {longest}; leave room for the prompt, also of questions"
        " that SFT validates on"
    )
    require(
        not rows or answer < longest,
        "generation.max_new_tokens",
        "must be below data.max_total_sequence_length",
        answer,
        remedy,
    )
    limit = max(1, longest - answer)
    token_ids, report = limit_length(
        to_prompts(rows, tokenizer), max_length=limit, policy=config.data.too_long, rows=rows
    )
    warn_of_cuts("prompts", report)
    return Prompts([rows[i] for i in report.kept], token_ids), lengths_of(token_ids, limit, report)


def tokenised_examples(
    config: Any, rows: Sequence[Any], tokenizer: Any
) -> tuple[list[Any], list[Example], Lengths]:
    """The rows that are used and their demonstrations, of at most `data.max_total_sequence_length`
    tokens; longer ones as `data.too_long` says.
    """
    limit = config.data.max_total_sequence_length
    examples, report = limit_length(
        to_examples(rows, tokenizer), max_length=limit, policy=config.data.too_long, rows=rows
    )
    warn_of_cuts("examples", report)
    return [rows[i] for i in report.kept], examples, lengths_of(examples, limit, report)


def lengths_of(items: Sequence[Any], limit: int, report: LengthReport) -> Lengths:
    """What is shown before the run of items that `limit_length` has left."""
    return Lengths(
        tokens=[num_tokens(item) for item in items],
        limit=limit,
        num_truncated=report.num_truncated,
        num_dropped=report.num_dropped,
    )


def row_order(config: Any, rows: Sequence[Any]) -> RowOrder:
    """The order in which training visits the rows, as `data.weights`, `data.shuffle` and `run.seed`
    say.
    """
    return RowOrder.of(
        rows, weights=config.data.weights, seed=config.run.seed, shuffle=config.data.shuffle
    )


def warn_of_cuts(what: str, report: LengthReport) -> None:
    """Nothing is cut or left out without a word. Raises ValueError if nothing is left."""
    if report.num_dropped and not report.kept:
        raise ValueError(
            f"data.max_total_sequence_length must leave a row to use, but all {report.num_dropped}"
            f" {what} are longer (up to {report.longest} tokens): raise it, or have them cut"
            " (data.too_long truncate)"
        )
    if report.num_truncated or report.num_dropped:
        warnings.warn(f"{what}: {report}", stacklevel=2)


def answering(
    config: Any, environment: EnvironmentInterface | None, prompts: Prompts
) -> Validate | None:
    """Validation by greedy answers to the prompts; None where there are none."""
    if not len(prompts):
        return None
    assert environment is not None
    check_rows(environment, prompts.rows)

    def validate(run: Run) -> tuple[dict[str, float], Samples]:
        sampling = config.generation.sampling_params(greedy=True)
        metrics, rollouts = evaluate(
            ready_generator(run), environment, prompts, sampling, seed=config.run.seed
        )
        return metrics, samples_of(rollouts, None, config.run.samples_per_step)

    return validate


def ready_generator(run: Run) -> GenerationBackend:
    """The run's generator, awake and with the trainer's present weights.

    They are sent when they are needed, rather than at the end of the step that made them, which is
    whole without it, whatever becomes of the engine.
    """
    assert run.generator is not None
    run.generator.wake()
    sync_weights(run.trainer, run.generator, version=run.state.policy_version)
    return run.generator


def evaluate(
    generator: GenerationBackend,
    environment: EnvironmentInterface,
    prompts: Prompts,
    sampling: SamplingParams,
    *,
    seed: int,
    first_group: int = 0,
) -> tuple[dict[str, float], Rollouts]:
    """Mean rewards, accuracy (see `Rollouts.correct`) and response length over all prompts, and the
    responses themselves.
    """
    rollouts = collect(
        generator, environment, prompts, sampling, seed=seed, first_group=first_group
    )
    return {
        **rollouts.metrics,
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
    }, rollouts


def spread(total: int, count: int) -> list[int]:
    """`count` rows from all over a batch of `total`; all of them where there are no more.

    >>> spread(10, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [place * total // count for place in range(count)]


def samples_of(rollouts: Rollouts, batch: TokenBatch | None, count: int) -> Samples:
    """`count` responses from all over the batch as rows of the sample log; with the batch, what it
    knows of each of their tokens as well: advantage and the trainer's logprob.
    """
    samples: Samples = []
    for i in spread(len(rollouts), count):
        completion = rollouts.completions[i]
        sample: dict[str, Any] = {
            "prompt": rollouts.texts[i],
            "response": completion.text,
            "reward": float(rollouts.rewards[i]),
            **rollouts.rewards_of(i),
            **({} if rollouts.answers[i] is None else {"extracted_answer": rollouts.answers[i]}),
            "group_id": int(rollouts.group_id[i]),
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
            "columns": plain(rollouts.rows[i]),
        }
        known = (
            {}
            if batch is None
            else {"advantages": batch.advantages, "trainer_logprobs": batch.prev_logprobs}
        )
        begin = len(rollouts.prompts[i])
        sample |= {
            name: values[i, begin : begin + len(completion.token_ids)].tolist()
            for name, values in known.items()
            if values is not None
        }
        samples.append(sample)
    return samples


def worst_tokens(
    sample: Mapping[str, Any], tokenizer: Any, *, count: int = 3
) -> list[dict[str, Any]]:
    """The tokens of a sample on which sampler and trainer differ most, the worst first: place in
    the response (from 0), text, both logprobs.
    """
    pairs = list(zip(sample["logprobs"], sample["trainer_logprobs"], strict=True))

    def gap(place: int) -> float:
        difference = abs(pairs[place][0] - pairs[place][1])
        return math.inf if math.isnan(difference) else difference

    return [
        {
            "position": place,
            "token": tokenizer.decode([sample["token_ids"][place]]),
            "logprob": pairs[place][0],
            "trainer_logprob": pairs[place][1],
        }
        for place in heapq.nlargest(count, range(len(pairs)), key=gap)
    ]


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that JSON can hold as they are."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, str | int | float | bool | Sequence) or value is None
    }

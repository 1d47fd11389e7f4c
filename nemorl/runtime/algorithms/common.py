"""What the algorithms share: the loop, rows as tokens, validation by answering, samples."""

import heapq
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.data.datasets import to_prompts
from nemorl.data.lengths import limit_length, num_tokens
from nemorl.data.order import RowOrder
from nemorl.data.sharding import merge, split, split_microbatches
from nemorl.data.statistics import Lengths
from nemorl.losses.logprobs import Logprobs
from nemorl.parallel.backend import TrainingBackend
from nemorl.rollout.collect import Prompts, Rollouts, collect
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.generation import GenerationBackend
from nemorl.runtime.run.callbacks import Callback, StopTraining, notify, notify_of_error
from nemorl.runtime.run.signals import update_in_progress
from nemorl.runtime.run.state import Run
from nemorl.runtime.run.weight_sync import sync_weights
from nemorl.runtime.watch.resources import ResourceMeter

Samples = list[dict[str, Any]]
Step = Callable[[Run], tuple[Run, dict[str, float], Samples]]
"""One step: returns the run after it, its metrics, and responses for the sample log."""
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
    """Take steps until `last_step`, validate when it is due, and call the callbacks.

    `StopTraining` from a callback, or a signal while the weights change, ends the run after the
    present step. An error reaches every callback's `on_exception`, with the run after its last
    whole step, before it is raised.
    """
    hooks, meter, period = _Hooks(callbacks), ResourceMeter(), run.config.run.val_period
    metrics: dict[str, float] = {}
    epoch, validated = -1, run.state.step

    def validation() -> Samples:
        nonlocal validated
        assert validate is not None
        measured, answers = validate(run)
        validated = run.state.step
        hooks.call("on_validation_end", run, validated, measured)
        return answers

    try:
        hooks.call("on_train_begin", run)
        if validate and run.config.run.val_at_start and run.state.step == 0:
            validation()
        while run.state.step < last_step and not hooks.stop:
            if run.state.epoch(num_rows) != epoch:
                epoch = run.state.epoch(num_rows)
                hooks.call("on_epoch_begin", run, epoch)
            hooks.call("on_step_begin", run, run.state.step + 1)
            before = run
            samples: Samples = []
            try:
                with update_in_progress(partial(_updated, run.trainer, run.trainer.step)):
                    run, metrics, samples = step(run)
                    metrics = metrics | meter.read()
                last = run.state.step == last_step
                if validate and (last or (period and run.state.step % period == 0)):
                    answers = validation()
                    samples = samples or answers
            finally:  # a whole step is recorded, though a signal or the validation ends the run
                if run is not before:
                    with update_in_progress():
                        hooks.record(run, metrics, samples)
            for passed in range(epoch, run.state.epoch(num_rows)):
                if passed != epoch:
                    hooks.call("on_epoch_begin", run, passed)
                hooks.call("on_epoch_end", run, passed, metrics)
        if validate and hooks.stop and run.state.step != validated:
            validation()
        hooks.call("on_train_end", run, metrics)
    except BaseException as error:
        notify_of_error(callbacks, run, error)
        raise
    return run


def _updated(trainer: TrainingBackend, step: int) -> bool:
    return trainer.step != step


class _Hooks:
    """The callbacks of a loop; `stop` is True once one of them has raised StopTraining."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks, self.stop = callbacks, False

    def call(self, hook: str, *args: Any) -> None:
        try:
            notify(self.callbacks, hook, *args)
        except StopTraining:
            self.stop = True

    def record(self, run: Run, metrics: dict[str, float], samples: Samples) -> None:
        try:
            if samples:
                self.call("on_samples", run, run.state.step, samples)
        finally:  # the last hook of a step: a checkpoint covers all that was recorded before
            self.call("on_step_end", run, run.state.step, metrics)


class Stopwatch:
    """Measures a step and its parts: `with watch("train"): ...` gives the metric seconds_train."""

    def __init__(self) -> None:
        self.start, self.parts = time.perf_counter(), dict[str, float]()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[f"seconds_{part}"] = time.perf_counter() - start

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return the seconds since the step began, those of its parts, and tokens per second."""
        seconds = time.perf_counter() - self.start
        return {"seconds": seconds, **self.parts, "tokens_per_second": num_tokens / seconds}


def tokenised_prompts(config: Any, rows: Sequence[Any], tokenizer: Any) -> tuple[Prompts, Lengths]:
    """Return the rows' prompts as token ids that leave room for an answer, and their lengths."""
    longest, answer = config.data.max_total_sequence_length, config.generation.longest_response
    require(
        not rows or answer < longest,
        "generation.max_new_tokens",
        "must be below data.max_total_sequence_length",
        answer,
        f"that is {longest}; leave room for the prompt, also of questions that SFT validates on",
    )
    prompts = to_prompts(rows, tokenizer)
    tokens, kept, lengths = within_limit("prompts", config, rows, prompts, room=answer)
    return Prompts(kept, tokens), lengths


def within_limit(
    what: str, config: Any, rows: Sequence[Any], items: Sequence[Any], *, room: int = 0
) -> tuple[list[Any], list[Any], Lengths]:
    """Return the items that leave `room` tokens of the longest sequence, their rows and lengths;
    `data.too_long` says what happens to the others.
    """
    limit = max(1, config.data.max_total_sequence_length - room)
    found, report = limit_length(items, max_length=limit, policy=config.data.too_long, rows=rows)
    if report.num_dropped and not report.kept:
        raise ValueError(
            f"data.max_total_sequence_length must leave a row to use, but all {report.num_dropped}"
            f" {what} are longer (up to {report.longest} tokens): raise it, or set data.too_long"
            " truncate"
        )
    if report.num_truncated or report.num_dropped:
        warnings.warn(f"{what}: {report}", stacklevel=3)
    lengths = Lengths(
        tokens=[num_tokens(item) for item in found],
        limit=limit,
        num_truncated=report.num_truncated,
        num_dropped=report.num_dropped,
    )
    return found, [rows[i] for i in report.kept], lengths


def row_order(config: Any, rows: Sequence[Any]) -> RowOrder:
    """Return the order in which training visits the rows."""
    return RowOrder.of(
        rows, weights=config.data.weights, seed=config.run.seed, shuffle=config.data.shuffle
    )


def num_steps(config: Any, num_rows: int) -> int:
    """Return the number of optimizer steps by `max_num_steps` or `num_epochs`."""
    whole = config.num_epochs * num_rows // config.train_global_batch_size
    return config.max_num_steps or max(1, whole)


def in_chunks(
    compute: Callable[[TokenBatch], Logprobs], batch: TokenBatch, *, rows: int
) -> Float[Tensor, "batch seq"]:
    """Return a model's logprobs of a batch of any size, computed `rows` rows at a time."""
    plan = split_microbatches(batch, rows=rows)
    return merge([compute(part).values for part in split(batch, plan)], plan)


def answering(
    config: Any, environment: EnvironmentInterface | None, prompts: Prompts
) -> Validate | None:
    """Return the validation by greedy answers to the prompts; None where there are none."""
    if not len(prompts):
        return None
    assert environment is not None
    check_rows(environment, prompts.rows)

    def validate(run: Run) -> tuple[dict[str, float], Samples]:
        sampling = config.generation.sampling_params(greedy=True)
        generator = ready_generator(run)
        rollouts = collect(generator, environment, prompts, sampling, seed=config.run.seed)
        return measured(rollouts), samples_of(rollouts, None, config.run.samples_per_step)

    return validate


def ready_generator(run: Run) -> GenerationBackend:
    """Return the run's generator, awake and with the trainer's present weights.

    Weights are not sent by the step that made them: a failing engine can't undo it.
    """
    assert run.generator is not None
    run.generator.wake()
    sync_weights(run.trainer, run.generator, version=run.state.policy_version)
    return run.generator


def measured(rollouts: Rollouts) -> dict[str, float]:
    """Return rewards, accuracy (see `Rollouts.correct`) and length of responses on average."""
    return {
        **rollouts.metrics,
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
    }


def spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `total`, or all of fewer.

    >>> spread(10, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [place * total // count for place in range(count)]


def whole_groups(groups: Sequence[int], count: int) -> list[int]:
    """Return the rows of evenly spaced whole groups: at most `count` rows, but one group at least.

    groups: the group of each row. A `count` of 0 takes none.

    >>> whole_groups([0, 0, 1, 1, 2, 2], 5), whole_groups([7, 7, 7], 2), whole_groups([7], 0)
    ([0, 1, 2, 3], [0, 1, 2], [])
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    found = list(members.values())
    number = max(1, count // max(map(len, found), default=1)) if count else 0
    return [row for place in spread(len(found), number) for row in found[place]]


def samples_of(rollouts: Rollouts, batch: TokenBatch | None, count: int) -> Samples:
    """Return `whole_groups` of responses as rows of the sample log; with a batch also their
    tokens' advantages and the trainer's logprobs.
    """
    values: dict[str, Any] = {}
    if batch is not None:
        values = {"advantages": batch.advantages, "trainer_logprobs": batch.prev_logprobs}
    samples: Samples = []
    for i in whole_groups(rollouts.group_id.tolist(), count):
        completion, begin = rollouts.completions[i], len(rollouts.prompts[i])
        end = begin + len(completion.token_ids)
        answer = rollouts.answers[i]
        samples.append(
            {
                "group": int(rollouts.group_id[i]),
                "prompt": rollouts.texts[i],
                "response": completion.text,
                "reward": float(rollouts.rewards[i]),
                **rollouts.rewards_of(i),
                **({} if answer is None else {"extracted_answer": answer}),
                "finish_reason": completion.finish_reason,
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "columns": dict(rollouts.rows[i]),
                **{name: v[i, begin:end].tolist() for name, v in values.items() if v is not None},
            }
        )
    return samples


def worst_tokens(
    sample: Mapping[str, Any], tokenizer: Any, *, count: int = 3
) -> list[dict[str, Any]]:
    """Return the tokens on which sampler and trainer differ most, the worst first."""
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

"""An open run and its steps: what happens around the lines of a training loop."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from torch import nn

from nemorl.checks import at_least, require, warn
from nemorl.data.rows import Row, RowOrder, StreamedRows
from nemorl.data.sources import set_names
from nemorl.data.statistics import Lengths
from nemorl.losses.types import Metric, finalize, merge
from nemorl.parallel.config import OptimizerConfig
from nemorl.rollout.collect import Rollouts, collect
from nemorl.rollout.conversation import Conversation, Prompts, segments_of
from nemorl.rollout.environment import check_rows
from nemorl.rollout.environments import Environment
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.run.data import row_order, tokenised_prompts
from nemorl.runtime.run.groups import GroupStream, Sampler
from nemorl.runtime.run.launch import Launch
from nemorl.runtime.run.parts import Backends, Parts, live_parts, other_setup, require_length
from nemorl.runtime.run.samples import (
    ENVIRONMENT,
    Samples,
    beside,
    by_set,
    compared,
    failures_of,
    measured,
    outcomes_of,
    samples_of,
    whole_groups,
)
from nemorl.runtime.run.saving import TrainResult, loop_callbacks
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.files import NotWritten, check_writer, memory_advice
from nemorl.runtime.store.state import POLICY, LoopState, OpenGroup
from nemorl.runtime.watch.callbacks import (
    Callback,
    StopTraining,
    closing,
    notify,
    notify_of_error,
    update_in_progress,
)

if TYPE_CHECKING:  # a small backend lacks methods, and raises AttributeError for them
    from nemorl.parallel.backend import FullTrainingBackend

Config = TypeVar("Config", bound=BaseConfig, covariant=True)
Validate = Callable[[], tuple[dict[str, float], Samples]]
"""Measures the present weights, and returns samples for the log."""
STEP, VALIDATION = 0, 1
"""Begin the numbers of seeds, apart from those of groups, `derive_seed(run.seed, number)`."""


class Run(Generic[Config]):
    """A run whose loop is the caller's own (`nemorl.open_run`), with settings of class Config.

    environment: judges responses; None for a config without `reward`. state: the finished steps.
    result: a `TrainResult`, once the run is closed.
    """

    def __init__(
        self,
        launch: Launch,
        stack: ExitStack,
        *,
        generates: bool | None = None,
        num_updates: int | None = None,
    ) -> None:
        self.launch, self.config = launch, cast(Config, launch.config)
        self.tokenizer, self.environment = launch.tokenizer, launch.environment
        self.rows, self.validation_rows = launch.rows, launch.validation_rows
        self.directory = launch.directory.path
        self.state = self.taken = LoopState(self.config.run.seed)
        """After the last finished step, and with what was taken since."""
        self.result: TrainResult | None = None
        self.lengths: dict[str, Lengths] = {}
        """Lengths of the data sets, by name: shown when the model is loaded, and in data.json."""
        self.num_rows: dict[str, int] = {}
        self.missed: set[int] = set()
        """Numbers of groups that were not sampled before the end of their step."""
        questions = any(row.get("answer") is not None for row in self.validation_rows)
        usual = self.config.generates(answers=questions)
        self.generates, self._num_updates = usual if generates is None else generates, num_updates
        self.num_steps: int | None = None  # before the loop
        self.live: Parts | None = None
        self.callbacks: Sequence[Callback] = ()  # before the loop
        require_length(self.config.optimizer.schedule, self.num_updates)
        self.others = Backends(launch, stack, generates=self.generates)
        self.loop: Steps | None = None
        self.sampler = Sampler(self)
        self._over = False

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps of the whole run; None where nothing says it."""
        if self._num_updates is not None:
            return self._num_updates
        steps = self.config.planned_steps(self.num_rows.get("train", len(self.rows)))
        return steps and steps * self.config.updates_per_step

    @property
    def trainer(self) -> "FullTrainingBackend":
        """The training backend, with the weights of the last checkpoint; loaded on first use."""
        return cast("FullTrainingBackend", self.parts().trainer)  # what it lacks is an error there

    @property
    def generator(self) -> GenerationBackend:
        """The generation backend; its weights are up to date within `sampling`."""
        found, remedy = self.parts().generator, "call nemorl.open_run(config, generates=True)"
        require(self.generates, "generates", "must be True for a run that samples", False, remedy)
        assert found is not None
        return found

    def backend(
        self,
        name: str,
        *,
        model: str | Path | nn.Module | None = None,
        head: Literal["lm", "scalar"] = "lm",
        trains: bool = True,
        optimizer: OptimizerConfig | None = None,
        own_ranks: bool = False,
    ) -> Any:
        """Load another model beside `run.trainer`, on the same devices, and return its backend.

        One that trains is saved in every checkpoint under its name, comes back with the last one,
        and has its model written to hf-NAME/; ask for it before the first step. One that does not,
        such as a teacher, may come at any time and is never saved.

        Args:
            name: a Python name; "policy" is `run.trainer`.
            model: folder, hub name or loaded model; None: the policy's, untrained. Where that was
                given in memory, None is for calls before `run.trainer` is used.
            head: "scalar" gives a value per token in place of logprobs.
            trains: whether it has an optimizer, and is saved.
            optimizer: None for `config.optimizer`; its schedule is over `num_updates` steps.
            own_ranks: whether Ray places as many ranks for it as the policy has.
        Raises: ValueError for a name that is taken, or that the last checkpoint does not hold.
        """
        self._open()
        updates, begun = self.num_updates, self.loop is not None and self.loop.begun
        self.others.check_new(name, trains, optimizer, begun=begun, num_updates=updates)
        kind: Any = {"head": head, "trains": trains, "optimizer": optimizer, "own_ranks": own_ranks}
        setup, model = other_setup(self.others, model, updates, live=self.live, **kind)
        live = self.parts() if trains else self.live
        return self.others.add(name, setup, model, own_ranks=own_ranks, live=live)

    def release(self, name: str) -> None:
        """Shut down a backend that does not train, before the end of the run."""
        self._open()
        self.others.release(name)

    def prompts(self, rows: Sequence[Row] | None = None, *, name: str = "train") -> "PromptStream":
        """Return the prompts of `rows` (None: `data.train`) in the run's seeded order.

        The number of prompts taken is saved under `name` with every checkpoint. Raises ValueError
        for rows that the environment can't judge.
        """
        rows = self.rows if rows is None else rows
        rows = check_rows(self.environment, rows)
        found = tokenised_prompts(self.config, rows, self.tokenizer, self.environment)
        prompts, self.lengths[name] = found
        return PromptStream(prompts, self.order(prompts.rows, name=name))

    def order(self, rows: Sequence[Any], *, name: str = "train") -> "RowStream":
        """Return the seeded order of rows; its place is saved under `name`."""
        order = row_order(self.config, rows, weighted=name == "train")
        self.num_rows[name] = order.num_rows
        return RowStream(self, order, name)

    def questions(self, rows: Sequence[Row]) -> Validate | None:
        """Return a validation by greedy answers to rows; None without rows."""
        environment = self.environment
        if not rows or environment is None:
            return None
        check_rows(environment, rows)
        prompts, lengths = tokenised_prompts(self.config, rows, self.tokenizer, environment)
        self.lengths.setdefault("validation", lengths)
        return partial(_answered, self, prompts, environment)

    def steps(self, last_step: int, *, validate: Validate | None = None) -> "Steps":
        """Return an iterator over the steps up to `last_step`, from the last checkpoint on.

        Between two steps it logs, validates (None: greedy answers to `data.validation`), saves and
        calls the callbacks when they are due. The loop may be left at any time.
        """
        self._open()
        at_least(1, last_step=last_step)
        if self.loop is not None:
            raise RuntimeError(
                "run.steps must be called once in a run, but this is a second loop: open another"
                " run for it, in a directory of its own"
            )
        if self._num_updates is None:
            updates = self.config.updates_per_step
            self.others.check_last_step(last_step, updates, planned=self.num_updates)
            self._num_updates = last_step * updates
        if validate is None and self.generates:
            validate = self.questions(self.validation_rows)
        self.num_steps, self.loop = last_step, Steps(self, last_step, validate)
        return self.loop

    def groups(
        self,
        prompts: "PromptStream",
        environment: Environment | None = None,
        *,
        count: int,
        n: int = 1,
        params: SamplingParams | None = None,
    ) -> GroupStream:
        """Return a stream of groups, `count` for each step: its `next()` gives the `n` responses
        to each of the next prompts, sampled ahead with async.max_staleness of 1 or more.

        environment, params: as of `Step.sample`.
        """
        self._open()
        at_least(1, count=count, n=n)
        environment, params = self.asked(environment, params)
        stream = GroupStream(self, prompts, environment, count=count, n=n, params=params)
        self.sampler.streams.append(stream)
        return stream

    def asked(
        self, environment: Environment | None, params: SamplingParams | None
    ) -> tuple[Environment, SamplingParams]:
        environment = environment or self.environment
        if environment is None:
            raise ValueError(
                "environment must judge the responses, but there is none: pass one, or give"
                " open_run a config with a reward"
            )
        return environment, params or self.config.generation.sampling_params()

    @property
    def present(self) -> "Step | None":
        """The present step; None outside of the loop over `steps`."""
        return None if self.loop is None else self.loop.step

    @property
    def step(self) -> "Step":
        """The present step. Raises RuntimeError outside of the loop over `steps`."""
        if self.present is None:
            raise RuntimeError("there is no step now: use it in the loop over run.steps(…)")
        return self.present

    def sampling(self) -> AbstractContextManager[GenerationBackend]:
        """Have the generator awake with the trainer's present weights in the block, and asleep
        after it: the trainer needs its memory. May be nested. What is sampled ahead goes on in the
        block, and after it in an engine that does not sleep.
        """
        return self.sampler.awake()

    def make_room(self) -> None:
        """Free memory of the trainer's devices for the generator."""
        others = [*self.others.trained.values(), *self.others.frozen.values()]
        self.others.make_room([self.trainer], keep_weights=self.parts().shares_weights)
        self.others.make_room(others)

    @property
    def backends(self) -> "dict[str, FullTrainingBackend]":
        """All backends that train, by name, the policy first."""
        return {POLICY: self.trainer, **self.others.trained}

    @property
    def updates(self) -> int:
        """Optimizer steps of all backends."""
        return sum(backend.step for backend in self.backends.values())

    def end_step(self) -> None:
        self.state = self.taken = self.taken.advance()
        self.sampler.end_step()

    def fail(self, error: BaseException) -> BaseException:
        """Tell the callbacks of an error, and return the one to raise."""
        check_writer(self.directory)
        if self.loop is not None:
            error = self.loop.leave_update(error)
        if advice := memory_advice(error):
            error.add_note(advice)
        if self.callbacks:
            notify_of_error(self.callbacks, self, error)
        return error

    def close(self) -> None:
        self._over = True
        self.sampler.close()

    def _open(self) -> None:
        check_writer(self.directory)
        if self._over:
            raise RuntimeError("the run is closed: use it inside `with nemorl.open_run(...)`")

    def parts(self) -> Parts:
        """Return what is live, loaded on first use."""
        self._open()
        if self.live is None:
            self.others.make_room(self.others.frozen.values())  # an engine may start
            self.live = live_parts(self.others, self.lengths, num_updates=self.num_updates)
            self.state = self.taken = self.live.state
        return self.live


def _answered(
    run: Run, prompts: Prompts, environment: Environment
) -> tuple[dict[str, float], Samples]:
    params = run.config.generation.sampling_params(greedy=True)
    seed = derive_seed(run.config.run.seed, VALIDATION, 0)
    with run.sampling() as generator:
        found = collect(generator, environment, prompts, params, seed=seed)
    count, data = run.config.run.samples_per_step, run.config.data
    names = set_names(data.train if data.held_out else data.validation)
    try:
        directory, outcomes = RunDirectory(run.directory), outcomes_of(found, names)
        directory.append_outcomes(run.state.step, outcomes)
    except NotWritten as error:
        warn(f"the run continues without this record: {error}")
    samples = samples_of(found, None, whole_groups(found.group_id.tolist(), count))
    samples += failures_of(found, count)
    return measured(found) | by_set(found, names), samples


class RowStream:
    """Indices of rows in a seeded order that goes on where the last checkpoint left it."""

    def __init__(self, run: Run, order: RowOrder | StreamedRows, name: str) -> None:
        self.run, self.order, self.name = run, order, name

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    def next(self, count: int) -> list[int]:
        """Return the next `count` rows' indices, of the present step, or of the next one if taken
        before it; a new epoch begins where one ends.
        """
        at_least(1, count=count)
        self.run.parts()  # which knows where the last checkpoint left it
        self.run.taken, rows = self.run.taken.take(self.name, self.order, count)
        return rows


@dataclass(frozen=True)
class PromptStream:
    """Prompts in a seeded order, each with the number of its group in the run."""

    prompts: Prompts
    rows: RowStream

    def __len__(self) -> int:
        return len(self.prompts)

    def next(self, count: int, *, ahead: int = 0) -> Prompts:
        """Return the next `count` prompts: of the present step, or of the next one if taken before
        it.

        ahead: how many steps later they are trained on. Until that step has ended they are open: a
        run that is resumed from a checkpoint before gets them again, with the same numbers.
        """
        at_least(1, count=count)
        at_least(0, ahead=ahead)
        run, rows = self.rows.run, self.rows
        run.parts()
        step = run.state.step + 1 + ahead
        run.taken, groups = run.taken.take_groups(rows.name, rows.order, count, step=step)
        return self._of(groups)

    def ahead(self, count: int) -> Prompts:
        """Return the next `count` prompts, open until a step trains on them (`GroupStream`)."""
        run, rows = self.rows.run, self.rows
        run.taken, groups = run.taken.take_groups(rows.name, rows.order, count, step=None)
        return self._of(groups)

    def _of(self, groups: Sequence[OpenGroup]) -> Prompts:
        rows = self.rows
        last = max(group.row for group in groups)
        fits = f"must have the rows of the groups that are open, up to number {last + 1}"
        remedy = "resume with the data of that run"
        what = f"the prompts of {rows.name!r}"
        require(last < rows.num_rows, what, fits, rows.num_rows, remedy)
        found = self.prompts.take([group.row for group in groups])
        return replace(found, groups=[group.ordinal for group in groups])


class Step:
    """One step of a run: what it samples and logs. number: counted from 1."""

    def __init__(self, run: Run) -> None:
        self.run, self.number = run, run.state.step + 1
        self.seed = derive_seed(run.state.seed, STEP, run.state.step)
        """For random choices of the loop's own: the same after a resume."""
        self.samples: Samples = []
        self._logged: dict[str, Metric | float] = {}
        self._seconds, self._begin = dict[str, float](), time.perf_counter()
        self._tokens, self._ages = 0, Counter[int]()
        self.sent = 0
        """How often the generator was given new weights."""
        self._oldest = 0
        """Steps by which the weights of its tokens may be older."""
        self._before, self._updates = run.taken, run.updates
        if (generator := run.parts().generator) is not None:
            generator.metrics()  # resets them after the check at the start, or a validation

    def sample(
        self,
        prompts: Prompts,
        environment: Environment | None = None,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
    ) -> Rollouts:
        """Return `n` conversations about each prompt with the present weights, led or judged by the
        environment or by an episode, `async def episode(row, policy) -> Outcome` (None: as the
        config says).

        Their random numbers follow from the run's seed and the numbers of their groups. Prompts
        without a number, or sampled before, get new ones. params: None for `config.generation`'s.

        Raises: ValueError for prompts of a step that has ended.
        """
        if missed := self.run.missed.intersection(prompts.groups):
            raise ValueError(
                "prompts must be sampled by the end of the step for which they were taken, but"
                f" group {min(missed)} was taken for an earlier one, and a resumed run would lose"
                " it: take prompts for the next step by prompts.next(count, ahead=1)"
            )
        environment, params = self.run.asked(environment, params)
        taken, groups = self.run.taken.sample(prompts.groups, len(prompts))
        with self.run.sampling() as generator, self.timed("generate"):
            found = collect(
                generator,
                environment,
                replace(prompts, groups=groups),
                replace(params, n=n),
                seed=taken.seed,
            )
        self.run.taken = taken
        self.count(found.conversations)
        return found

    def count(self, conversations: Iterable[Conversation]) -> None:
        """Add to the step's tokens_per_second."""
        ends = [part[-1] for each in conversations for part in segments_of(each.turns)]
        self._tokens += sum(len(end.prompt) + len(end.completion.token_ids) for end in ends)

    def aged(self, conversations: Iterable[Conversation], *, most: int) -> None:
        """Add the ages of tokens, in steps, to the metrics of staleness.

        Raises: RuntimeError for a token that is older than `most`.
        """
        for each in conversations:
            for turn in each.turns:
                versions = turn.completion.policy_versions
                if most and len(versions) < len(turn.completion.token_ids):
                    raise RuntimeError(
                        "tokens must carry the version of their weights with async.max_staleness,"
                        f" but {len(turn.completion.token_ids) - len(versions)} do not: give"
                        " completions policy_versions"
                    )
                for version, number in Counter(versions).items():
                    self._ages[self.number - 1 - self.run.sampler.synced_at(version)] += number
        self._oldest = most
        if self.staleness > most:
            raise RuntimeError(
                f"no token of step {self.number} may be older than {most} steps"
                f" (async.max_staleness), but one is {self.staleness} steps old: resume the run"
                " from its last checkpoint, and report this"
            )

    @property
    def staleness(self) -> int:
        """Steps by which the weights that sampled a token are older than this step, at most."""
        return max(self._ages, default=0)

    def log(
        self,
        metrics: Mapping[str, Metric | float],
        samples: Rollouts | Samples | None = None,
    ) -> None:
        """Add measurements of this step: numbers, or metrics of a training step, of which those of
        one name are combined, and a number of that name is logged as environment/NAME. samples:
        for the sample log; `Rollouts` are measured as well.
        """
        if isinstance(samples, Rollouts):
            sets = by_set(samples, set_names(self.run.config.data.train))
            self.log({**compared(samples, self.run.config), **sets})
            count = self.run.config.run.samples_per_step
            rows = whole_groups(samples.group_id.tolist(), count)
            samples = samples_of(samples, None, rows) + failures_of(samples, count)
        for name, value in metrics.items():
            before = self._logged.get(name)
            if isinstance(value, Metric) and isinstance(before, Metric):
                value = merge({name: before}, {name: value})[name]
            elif isinstance(value, Metric) and before is not None:
                self._logged[ENVIRONMENT + name] = before
            elif isinstance(before, Metric):
                name = ENVIRONMENT + name
            self._logged[name] = value
        self.samples = [*self.samples, *(samples or ())]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure the block: adds to the metric seconds_PART."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self._seconds[part] = self._seconds.get(part, 0.0) + took

    @property
    def used(self) -> bool:
        """Whether anything has been logged, learned or taken."""
        learned = self.run.updates != self._updates
        return learned or bool(self._logged) or self.run.taken != self._before

    def metrics(self) -> dict[str, float]:
        """Return what was logged, what the generator measured, and how long it took."""
        if self._tokens:
            measured = self.run.generator.metrics()
            self.log({f"generation/{name}": value for name, value in measured.items()})
            if any(name.endswith("/restarts") for name in measured):  # of engines' processes
                self.log({"generation/weights/updates": float(self.sent)})
        logged = self._logged.items()
        read = finalize({name: value for name, value in logged if isinstance(value, Metric)})
        numbers = {**self._logged, **read}  # in the order in which they were logged
        found = {name: float(value) for name, value in numbers.items()}  # type: ignore[arg-type]
        seconds = time.perf_counter() - self._begin
        if total := self._ages.total():
            mean = sum(age * number for age, number in self._ages.items()) / total
            found |= {"staleness/mean": mean, "staleness/max": float(self.staleness)}
            found["staleness/limit"] = float(self._oldest)
            shares = sorted(self._ages.items())
            found |= {f"staleness/{age}": number / total for age, number in shares}
        parts = {f"seconds_{name}": took for name, took in self._seconds.items()}
        tokens = self._tokens or found.get("num_tokens", 0.0)
        return beside({"seconds": seconds, **parts, "tokens_per_second": tokens / seconds}, found)


class Steps(Iterator[Step]):
    """The iterator of a training loop."""

    def __init__(self, run: Run, last_step: int, validate: Validate | None) -> None:
        self.run, self.last_step, self.validate = run, last_step, validate
        self.step: Step | None = None
        self._stop = self._ended = self.begun = False
        self._update, self._passed = ExitStack(), -1
        self._validated = self._first = self._updates = 0
        self._metrics: dict[str, float] = {}

    def __next__(self) -> Step:
        if not self.begun:
            self._begin()
        self._finish_step()
        if self._ended or self._stop or self.run.state.step >= self.last_step:
            self.finish()
            raise StopIteration
        epoch = self._epoch()
        if epoch != self._passed:
            self._passed = epoch
            self._call("on_epoch_begin", epoch)
        self._call("on_step_begin", self.run.state.step + 1)
        self.step, before = Step(self.run), self.run.updates
        begun = update_in_progress(lambda: self.run.updates != before)
        self._update.enter_context(begun)
        return self.step

    def finish(self) -> None:
        """End the loop, also after a `break`: a step that has done something counts."""
        if self._ended or not self.begun:
            return
        if self.step is not None and not self.step.used:
            self.step = None
            self._update.close()
        self._finish_step()
        self._ended = True
        if self.validate and self.run.state.step != self._validated:
            self._validation()
        trained = self.run.updates > self._updates
        # A loop that counts its updates has itself decided against them.
        if self.run.state.step > self._first and not trained and "num_updates" not in self._metrics:
            warn(
                f"the loop took {self.run.state.step - self._first} steps, but trained in none of"
                " them: call run.trainer.train_step(batch, loss_fn)"
            )
        if self.run.sampler.ahead and not self.run.sampler.streams:
            warn(
                "async.max_staleness is set, but the loop took no groups from run.groups, so"
                " nothing was sampled ahead: use it in place of step.sample"
            )
        self._call("on_train_end", self._metrics)

    def leave_update(self, error: BaseException) -> BaseException:
        """Return the error that ends the loop: a signal that waited for the step comes first."""
        try:
            self._update.__exit__(type(error), error, error.__traceback__)
        except BaseException as signal:
            return signal
        return error

    def _begin(self) -> None:
        run, launch, backends = self.run, self.run.launch, self.run.others
        backends.require_all_of(run.parts().resumed_from)
        run.callbacks = loop_callbacks(launch, run.backends, total_steps=self.last_step)
        own = run.callbacks[1 + len(launch.callbacks) :]  # the others outlive a run with new ranks
        backends.stack.enter_context(closing(own))
        self.begun = True
        self._first, self._updates = self.run.state.step, self.run.updates
        self._validated = self._first
        if self._first >= self.last_step:
            warn(
                f"the run has {self._first} steps already, so there is nothing to do up to step"
                f" {self.last_step}: raise max_num_steps"
            )
        self._call("on_train_begin")
        if self.validate and self.run.config.run.val_at_start and self._first == 0:
            self._validation()

    def _finish_step(self) -> None:
        step = self.step
        if step is None:
            return
        try:
            with self._update:
                self._metrics = step.metrics()
                self.step = None  # though a full disk may end the loop here
                self._note_groups()  # before a checkpoint has the step
                self.run.end_step()
            number, period = self.run.state.step, self.run.config.run.val_period
            if self.validate and (number == self.last_step or (period and number % period == 0)):
                answers = self._validation()
                step.samples = step.samples or answers
        finally:
            if self.run.state.step == step.number:
                with update_in_progress():
                    self._record(step.samples)
        for passed in range(self._passed, self._epoch()):
            if passed != self._passed:
                self._call("on_epoch_begin", passed)
            self._call("on_epoch_end", passed, self._metrics)

    def _note_groups(self) -> None:
        run, taken = self.run, self.run.taken
        closed = taken.closing()
        missed = tuple(group.ordinal for group in closed if not group.sampled)
        run.missed |= {*missed}
        ends = {group.ordinal for group in closed}
        line = {
            "trained": [group.ordinal for group in closed if group.sampled],
            "dropped": {**taken.dropped, **({"not sampled": missed} if missed else {})},
            "open": [g.ordinal for g in taken.open_groups if g.ordinal not in ends],
        }
        if any(line.values()):
            self._metrics = {**self._metrics, "groups_trained": float(len(line["trained"]))}
            RunDirectory(run.directory).append_groups(taken.step + 1, line)

    def _epoch(self) -> int:
        state = self.run.state
        open_ones = sum(group.stream == "train" for group in state.open_groups)
        done = state.cursors.get("train", 0) - open_ones
        return done // self.run.num_rows.get("train", 1)

    def _validation(self) -> Samples:
        assert self.validate is not None
        measured, answers = self.validate()
        self._validated = self.run.state.step
        self._call("on_validation_end", self._validated, measured)
        return answers

    def _record(self, samples: Samples) -> None:
        step = self.run.state.step
        try:
            if samples:
                self._call("on_samples", step, samples)
        finally:  # the last hook of a step: a checkpoint covers all that was recorded before it
            self._call("on_step_end", step, self._metrics)

    def _call(self, hook: str, *args: Any) -> None:
        try:
            notify(self.run.callbacks, hook, self.run, *args)
        except StopTraining:
            self._stop = True

"""An open run and its steps: what happens around the lines of a training loop."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from nemorl.checks import at_least, require
from nemorl.data.order import RowOrder
from nemorl.data.rows import Row
from nemorl.data.statistics import Lengths
from nemorl.losses.types import Metric, merge
from nemorl.rollout.collect import Prompts, Rollouts, collect
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.runtime.run.callbacks import Callback, StopTraining, notify, notify_of_error
from nemorl.runtime.run.data import row_order, tokenised_prompts
from nemorl.runtime.run.errors import MEMORY_ADVICE, out_of_memory
from nemorl.runtime.run.files import check_writer
from nemorl.runtime.run.result import TrainResult
from nemorl.runtime.run.samples import Samples, compared, measured, samples_of
from nemorl.runtime.run.signals import update_in_progress
from nemorl.runtime.run.state import LoopState, Run
from nemorl.runtime.run.weight_sync import sync_weights
from nemorl.warn import warn

T = TypeVar("T")
Validate = Callable[[], tuple[dict[str, float], Samples]]
"""Measures the present weights, and returns samples for the log."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is live from the first step on."""

    trainer: Any
    generator: GenerationBackend | None
    state: LoopState
    """As the last checkpoint left it."""
    callbacks: Sequence[Callback]
    shares_weights: bool = True
    """Whether the generator computes with the trainer's own weights."""


class OpenRun:
    """A run whose loop is the caller's own (`nemorl.open_run`).

    config: its settings, with lengths that fit the model. tokenizer. environment: judges responses;
    None for a config without `reward`. rows, validation_rows: of the data sets. directory: of the
    run. state: the finished steps. result: a `TrainResult`, once the run is closed.
    """

    def __init__(
        self,
        *,
        config: Any,
        tokenizer: Any,
        environment: EnvironmentInterface | None,
        rows: Sequence[Row],
        validation_rows: Sequence[Row],
        directory: Path,
        start: "Callable[[OpenRun], Parts]",
        load_frozen: Callable[[str], Any],
    ) -> None:
        self.config, self.tokenizer, self.environment = config, tokenizer, environment
        self.rows, self.validation_rows, self.directory = rows, validation_rows, directory
        self.state = LoopState(config.run.seed)
        self.result: TrainResult | None = None
        self.lengths: dict[str, Lengths] = {}
        """Of the data sets, by name: shown when the model is loaded, and kept in data.json."""
        self.num_rows: dict[str, int] = {}
        """Of the orders, by name."""
        self.generates = False
        self.num_steps: int | None = getattr(config, "max_num_steps", None) or None
        self.num_updates = self.num_steps
        """Optimizer steps of the whole run."""
        self.initial: Callable[[Any], None] | None = None
        """Called with the trainer before a checkpoint is loaded."""
        self._start, self._load_frozen = start, load_frozen
        self._frozen: list[Any] = []
        self.live: Parts | None = None
        self._steps: Steps | None = None
        self._over = False

    @property
    def trainer(self) -> Any:
        """The training backend, with the weights of the last checkpoint; loaded on first use."""
        return self._live().trainer

    @property
    def generator(self) -> GenerationBackend:
        """The generation backend; its weights are up to date within `sampling`."""
        self.generates = True
        found = self._live().generator
        if found is None:
            raise RuntimeError(
                "run.generator must be asked for before the trainer is loaded: call run.prompts(),"
                " or use run.generator once, before run.trainer and the first step"
            )
        return found

    def prompts(self, rows: Sequence[Row] | None = None, *, name: str = "train") -> "PromptStream":
        """Return the prompts of `rows` (None: `data.train`) in the run's seeded order.

        The number of prompts taken is saved under `name` with every checkpoint. Raises ValueError
        for rows that the environment can't judge.
        """
        rows = self.rows if rows is None else rows
        if self.environment is not None:
            check_rows(self.environment, rows)
        prompts, self.lengths[name] = tokenised_prompts(self.config, rows, self.tokenizer)
        self.generates = True
        return PromptStream(prompts, self.order(prompts.rows, name=name))

    def order(self, rows: Sequence[Any], *, name: str = "train") -> "RowStream":
        """Return the seeded order of rows; its place is saved under `name`."""
        order = row_order(self.config, rows)
        self.num_rows[name] = order.num_rows
        return RowStream(self, order, name)

    def questions(self, rows: Sequence[Row]) -> Validate | None:
        """Return a validation by greedy answers to rows, judged by the environment; None without
        rows.
        """
        environment = self.environment
        if not rows or environment is None:
            return None
        check_rows(environment, rows)
        prompts, lengths = tokenised_prompts(self.config, rows, self.tokenizer)
        self.lengths.setdefault("validation", lengths)
        self.generates = True

        def validate() -> tuple[dict[str, float], Samples]:
            params = self.config.generation.sampling_params(greedy=True)
            with self.sampling() as generator:
                found = collect(generator, environment, prompts, params, seed=self.config.run.seed)
            return measured(found), samples_of(found, None, self.config.run.samples_per_step)

        return validate

    def with_initial_model(self, use: Callable[[Any], T]) -> T:
        """Return use(trainer), called with the weights that training begins from, also in a resumed
        run. Call `steps` before, and iterate after.
        """
        require(
            self.live is None,
            "with_initial_model",
            "must come before the first use of run.trainer",
            "a live trainer",
            "move it up",
        )
        found: list[T] = []
        self.initial = lambda trainer: found.append(use(trainer))
        self._live()
        return found[0]

    def frozen_model(self, path: str | Path) -> Any:
        """Load a second model, such as a teacher, on as many ranks as the trainer has, and return
        its backend: `get_logprobs(batch)` gives its log-probabilities. It ends with the run.
        """
        self._open()
        self._frozen.append(self._load_frozen(str(path)))
        return self._frozen[-1]

    def steps(
        self,
        last_step: int,
        *,
        updates_per_step: int = 1,
        validate: Validate | None = None,
    ) -> "Steps":
        """Return an iterator over the steps up to `last_step`, from the last checkpoint on.

        Between two steps it logs, validates (None: greedy answers to `data.validation`), saves and
        calls the callbacks when they are due. The loop may be left at any time.
        updates_per_step: optimizer steps, for the schedule of the learning rate.
        """
        self._open()
        at_least(1, last_step=last_step, updates_per_step=updates_per_step)
        if self._steps is not None:
            raise RuntimeError(
                "run.steps must be called once in a run, but this is a second loop: open another"
                " run for it, in a directory of its own"
            )
        if self.live is not None and self.num_updates != last_step * updates_per_step:
            raise RuntimeError(
                f"run.steps must take {self.num_updates} optimizer steps, as the schedule of the"
                f" learning rate was made for them, but takes {last_step * updates_per_step}: call"
                " it before the first use of run.trainer, or change max_num_steps"
            )
        if validate is None and self.generates:
            validate = self.questions(self.validation_rows)
        self.num_steps, self.num_updates = last_step, last_step * updates_per_step
        self._steps = Steps(self, last_step, validate)
        return self._steps

    @contextmanager
    def sampling(self) -> Iterator[GenerationBackend]:
        """Have the generator awake with the trainer's present weights in the block, and asleep
        after it: the trainer needs its memory. May be nested.
        """
        generator, nested = self.generator, self._awake
        step = None if self._steps is None else self._steps.step
        with nullcontext() if step is None else step.timed("sync"):
            if not nested:
                self._offload([self.trainer], keep_weights=self._live().shares_weights)
                self._offload(self._frozen)
                generator.wake()
            sync_weights(self.trainer, generator)
        self._awake = True
        try:
            yield generator
        finally:
            check_writer(self.directory)  # after rewards, and before an engine is called
            self._awake = nested
            if not nested:
                generator.sleep()

    _awake = False

    def _offload(self, backends: Sequence[Any], **options: Any) -> None:
        """Free the devices of what generation does not need, if that is asked for."""
        for backend in backends if self.config.trainer.offload_during_generation else ():
            backend.offload(**options)

    @property
    def view(self) -> Run:
        """The run as its callbacks see it."""
        parts = self._live()
        return Run(
            self.config, parts.trainer, parts.generator, self.tokenizer, self.state, self.directory
        )

    def finish(self) -> None:
        """End the run in order, after its loop."""
        if self._steps is not None:
            self._steps.finish()

    def fail(self, error: BaseException) -> BaseException:
        """Tell the callbacks of an error, and return the one to raise: a signal that waited comes
        first.
        """
        check_writer(self.directory)
        if self._steps is not None:
            error = self._steps.leave_update(error)
        if out_of_memory(error):
            error.add_note(MEMORY_ADVICE)
        if self._steps is not None and self._steps.begun and self.live is not None:
            notify_of_error(self.live.callbacks, self.view, error)
        return error

    def close(self) -> None:
        self._over = True

    def _open(self) -> None:
        check_writer(self.directory)
        if self._over:
            raise RuntimeError("the run is closed: use it inside `with nemorl.open_run(...)`")

    def _live(self) -> Parts:
        self._open()
        if self.live is None:
            self._offload(self._frozen)  # an engine may start
            self.live = self._start(self)
            self.state = self.live.state
        return self.live

    def _step(self, what: str) -> "Step":
        step = None if self._steps is None else self._steps.step
        if step is None:
            raise RuntimeError(f"{what} belongs to a step: call it inside `for step in run.steps`")
        return step


class RowStream:
    """Indices of rows in a seeded order that goes on where the last checkpoint left it."""

    def __init__(self, run: OpenRun, order: RowOrder, name: str) -> None:
        self.run, self.order, self.name = run, order, name

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    def next(self, count: int) -> list[int]:
        """Return the next `count` rows' indices; a new epoch begins where one ends."""
        at_least(1, count=count)
        step = self.run._step("next()")
        cursor = step.cursors.get(self.name, 0)
        step.cursors[self.name] = cursor + count
        return self.order.take(cursor, count)


@dataclass(frozen=True)
class PromptStream:
    """Prompts in a seeded order."""

    prompts: Prompts
    rows: RowStream

    def __len__(self) -> int:
        return len(self.prompts)

    def next(self, count: int) -> Prompts:
        """Return the next `count` prompts."""
        return self.prompts.take(self.rows.next(count))


class Step:
    """One step of a run: what it samples and logs. number: counted from 1."""

    def __init__(self, run: OpenRun) -> None:
        self.run, self.number = run, run.state.step + 1
        self.seed = derive_seed(run.state.seed, run.state.step)
        """For random choices of the loop's own: the same after a resume."""
        self.cursors = dict(run.state.cursors)
        self.samples: Samples = []
        self._logged: dict[str, Metric | float] = {}
        self._seconds, self._begin = dict[str, float](), time.perf_counter()
        self._groups = self._tokens = 0
        self._updates = run.trainer.step
        if (generator := run._live().generator) is not None:
            generator.metrics()  # begins anew, after the check at the start, or a validation

    def sample(
        self,
        prompts: Prompts,
        environment: EnvironmentInterface | None = None,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
    ) -> Rollouts:
        """Return `n` responses to each prompt by the present weights, judged by the environment
        (None: that of the config's reward).

        Their random numbers depend on the run's seed, the step and their place in it, so they are
        the same after a resume. params: None for those of `config.generation`.
        """
        environment = environment or self.run.environment
        if environment is None:
            raise ValueError(
                "environment must judge the responses, but there is none: pass one, or give"
                " open_run a config with a reward"
            )
        params = params or self.run.config.generation.sampling_params()
        with self.run.sampling() as generator, self.timed("generate"):
            found = collect(
                generator,
                environment,
                prompts,
                replace(params, n=n),
                seed=self.seed,
                first_group=self._groups,
            )
        self._groups += len(prompts)
        self._tokens += sum(map(len, found.prompts)) + int(found.lengths.sum())
        return found

    def log(
        self,
        metrics: Mapping[str, Metric | float],
        samples: Rollouts | Samples | None = None,
    ) -> None:
        """Add measurements of this step: numbers, or metrics as a training step returns them, of
        which those of one name are combined. samples: for the sample log; of `Rollouts` mean and
        spread of the reward, accuracy and length are logged as well, and equal rewards warned of.
        """
        if isinstance(samples, Rollouts):
            metrics = {**compared(samples), **metrics}
            samples = samples_of(samples, None, self.run.config.run.samples_per_step)
        for name, value in metrics.items():
            if isinstance(value, Metric):
                before = self._logged.get(name)
                earlier = {name: before} if isinstance(before, Metric) else {}
                value = merge(earlier, {name: value})[name]
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
        learned = self.run.trainer.step != self._updates
        return learned or bool(self._logged) or self.cursors != self.run.state.cursors

    def metrics(self) -> dict[str, float]:
        """Return what was logged, what the generator measured, and how long it took."""
        if self._groups:
            measured = self.run.generator.metrics().items()
            self.log({f"generation/{name}": value for name, value in measured})
        found = {
            name: value.finalize() if isinstance(value, Metric) else float(value)
            for name, value in self._logged.items()
        }
        seconds = time.perf_counter() - self._begin
        parts = {f"seconds_{name}": took for name, took in self._seconds.items()}
        tokens = self._tokens or found.get("num_tokens", 0.0)
        return {**found, "seconds": seconds, **parts, "tokens_per_second": tokens / seconds}


class Steps(Iterator[Step]):
    """The iterator of a training loop."""

    def __init__(self, run: OpenRun, last_step: int, validate: Validate | None) -> None:
        self.run, self.last_step, self.validate = run, last_step, validate
        self.step: Step | None = None
        self._stop = self._ended = self.begun = False
        self._update, self._epoch = ExitStack(), -1
        self._validated = self._first = self._updates = 0
        self._metrics: dict[str, float] = {}

    def __next__(self) -> Step:
        if not self.begun:
            self._begin()
        self._finish_step()
        if self._ended or self._stop or self.run.state.step >= self.last_step:
            self.finish()
            raise StopIteration
        epoch = self._epoch_of(self.run.state.cursors)
        if epoch != self._epoch:
            self._epoch = epoch
            self._call("on_epoch_begin", epoch)
        self._call("on_step_begin", self.run.state.step + 1)
        self.step, before = Step(self.run), self.run.trainer.step
        begun = update_in_progress(lambda: self.run.trainer.step != before)
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
        trained = self.run.trainer.step > self._updates
        # A loop that counts its updates has itself decided against them.
        if self.run.state.step > self._first and not trained and "num_updates" not in self._metrics:
            warn(
                f"the loop took {self.run.state.step - self._first} steps, but trained in none of"
                " them: call run.trainer.train_step(batch, loss_fn)"
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
        self.begun = True
        parts = self.run._live()
        self._first, self._updates = parts.state.step, parts.trainer.step
        self._validated = self._first
        self._call("on_train_begin")
        if self.validate and self.run.config.run.val_at_start and self._first == 0:
            self._validation()

    def _finish_step(self) -> None:
        """Close the present step: a whole one is recorded, though a signal or the validation ends
        the run.
        """
        step, whole = self.step, False
        if step is None:
            return
        try:
            with self._update:
                self._metrics = step.metrics()
                self.step, whole = None, True
                self.run.state = self.run.state.advance(step.cursors)
            number, period = self.run.state.step, self.run.config.run.val_period
            if self.validate and (number == self.last_step or (period and number % period == 0)):
                answers = self._validation()
                step.samples = step.samples or answers
        finally:
            if whole:
                with update_in_progress():
                    self._record(step.samples)
        now = self._epoch_of(self.run.state.cursors)
        for passed in range(self._epoch, now):
            if passed != self._epoch:
                self._call("on_epoch_begin", passed)
            self._call("on_epoch_end", passed, self._metrics)

    def _epoch_of(self, cursors: Mapping[str, int]) -> int:
        return cursors.get("train", 0) // self.run.num_rows.get("train", 1)

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
            notify(self.run._live().callbacks, hook, self.run.view, *args)
        except StopTraining:
            self._stop = True

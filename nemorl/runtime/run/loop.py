"""An open run and its steps: what happens around the lines of a training loop."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from torch import nn

from nemorl.checks import at_least, require, warn
from nemorl.data.batch import TokenBatch
from nemorl.data.packing import segments_apart
from nemorl.data.rows import Row, RowOrder, StreamedRows
from nemorl.data.sources import set_names
from nemorl.data.statistics import Lengths
from nemorl.losses.types import Metric, in_main_memory, merge
from nemorl.parallel.backend import LossFn
from nemorl.parallel.config import OptimizerConfig
from nemorl.rollout.admission import LoopState
from nemorl.rollout.collect import Rollouts, collect, join
from nemorl.rollout.conversation import segments_of
from nemorl.rollout.environment import check_rows
from nemorl.rollout.environments import Environment
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.grpo import ReceiptsConfig
from nemorl.runtime.run.data import tokenised_prompts
from nemorl.runtime.run.groups import Generation, GroupStream, Progress, PromptStream, RowStream
from nemorl.runtime.run.launch import Launch
from nemorl.runtime.run.parts import Backends, Parts, live_parts, other_setup, require_length
from nemorl.runtime.run.receipts import Ages, Receipts, TokenReceipt, with_receipts
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
from nemorl.runtime.store.files import NotWritten, check_writer, memory_advice
from nemorl.runtime.store.state import POLICY
from nemorl.runtime.watch import callbacks

if TYPE_CHECKING:  # a small backend lacks methods, and raises AttributeError for them
    from nemorl.parallel.backend import FullTrainingBackend

Config = TypeVar("Config", bound=BaseConfig, covariant=True)
Validate = Callable[[], tuple[dict[str, float], Samples]]
"""Measures the present weights, and returns samples for the log."""
STEP, VALIDATION = 0, 1
"""Begin the numbers of seeds, apart from those of groups, `derive_seed(run.seed, number)`."""


class Run(Generic[Config]):
    """A run whose loop is the caller's own (`nemorl.open_run`), with settings of class Config.

    environment: judges responses; None for a config without `reward`. result: once closed.
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
        self.train_sets = set_names(self.config.data.train)
        self.progress = Progress(LoopState(self.config.run.seed))
        self.result: TrainResult | None = None
        self.lengths: dict[str, Lengths] = {}
        """Of the data sets, by name: shown when the model is loaded, and in data.json."""
        self.num_rows: dict[str, int] = {}
        usual = self.config.generates(
            answers=any(row.get("answer") is not None for row in self.validation_rows)
        )
        self.generates, self._num_updates = usual if generates is None else generates, num_updates
        self.live: Parts | None = None
        self.callbacks: Sequence[callbacks.Callback] = ()  # before the loop
        require_length(self.config.optimizer.schedule, self.num_updates)
        self.others = Backends(launch, stack, generates=self.generates)
        self.loop: Steps | None = None
        self.generation = Generation(self.progress, self.config, self.directory)
        self._over = False

    @property
    def state(self) -> LoopState:
        """After the last finished step."""
        return self.progress.state

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
        return cast("FullTrainingBackend", self.parts().trainer)

    @property
    def generator(self) -> GenerationBackend:
        """The generation backend; its weights are up to date within `sampling`."""
        found = self.parts().generator
        require(
            self.generates,
            "generates",
            "must be True for a run that samples",
            False,
            "call nemorl.open_run(config, generates=True)",
        )
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
    ) -> "FullTrainingBackend":
        """Load another model beside `run.trainer`, on the same devices, and return its backend.

        One that trains is saved in every checkpoint, comes back with the last one, and is exported
        to hf-NAME/; ask for it before the first step. One that does not, such as a teacher, may
        come at any time and is never saved.

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
        taken = [POLICY, *self.others.trained, *self.others.frozen]
        free = name.isidentifier() and name not in taken
        must = f"must be a Python name, and none of {', '.join(taken)}, which are taken"
        require(free, "name", must, name, "choose another; the policy is run.trainer")
        late = trains and self.loop is not None and self.loop.begun
        must = "must be called before the first step for a backend that trains"
        require(not late, "run.backend", must, name, "move it above the loop")
        must, remedy = "must be None for a backend that does not train", "omit it, or trains=False"
        if optimizer is not None:
            require(trains, "optimizer", must, optimizer, remedy)
            require_length(optimizer.schedule, self.num_updates)
        kind: Any = {"head": head, "trains": trains, "optimizer": optimizer, "own_ranks": own_ranks}
        setup, model = other_setup(self.others, model, self.num_updates, live=self.live, **kind)
        return self.others.add(
            name, setup, model, own_ranks=own_ranks, live=self.parts() if trains else self.live
        )

    def release(self, name: str) -> None:
        """Shut down a backend that does not train, before the end of the run."""
        self._open()
        self.others.release(name)

    def prompts(self, rows: Sequence[Row] | None = None, *, name: str = "train") -> PromptStream:
        """Return the prompts of `rows` (None: `data.train`) in the run's seeded order.

        The number of prompts taken is saved under `name` with every checkpoint. Raises ValueError
        for rows that the environment can't judge.
        """
        rows = check_rows(self.environment, self.rows if rows is None else rows)
        prompts, self.lengths[name] = tokenised_prompts(
            self.config, rows, self.tokenizer, self.environment
        )
        return PromptStream(prompts, self.order(prompts.rows, name=name))

    def order(self, rows: Sequence[Any], *, name: str = "train") -> RowStream:
        """Return the seeded order of rows; its place is saved under `name`."""
        order: Any = rows
        if not isinstance(rows, StreamedRows):
            data, seed = self.config.data, self.config.run.seed
            weights = data.weights if name == "train" else ()
            order = RowOrder.of(rows, weights=weights, seed=seed, shuffle=data.shuffle)
        self.num_rows[name] = order.num_rows
        return RowStream(self._loaded, order, name)

    def questions(self, rows: Sequence[Row]) -> Validate | None:
        """Return a validation by greedy answers to rows; None without rows."""
        environment = self.environment
        if not rows or environment is None:
            return None
        check_rows(environment, rows)
        prompts, lengths = tokenised_prompts(self.config, rows, self.tokenizer, environment)
        self.lengths.setdefault("validation", lengths)

        def answered() -> tuple[dict[str, float], Samples]:
            params = self.config.generation.sampling_params(greedy=True)
            seed = derive_seed(self.config.run.seed, VALIDATION, 0)
            with self.sampling() as generator:
                found = collect(generator, environment, prompts, params, seed=seed)
            count, data = self.config.run.samples_per_step, self.config.data
            names = self.train_sets if data.held_out else set_names(data.validation)
            try:
                self.launch.directory.append_outcomes(self.state.step, outcomes_of(found, names))
            except NotWritten as error:
                warn(f"the run continues without this record: {error}")
            return measured(found) | by_set(found, names), _shown(found, count)

        return answered

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
            schedule, updates = self.others.schedule, self.config.updates_per_step
            require(
                schedule == "constant" or last_step * updates == self.num_updates,
                "last_step",
                f"times {updates} optimizer steps must be the {self.num_updates} for which"
                f" optimizer.schedule {schedule} is made",
                last_step,
                "change max_num_steps, or give nemorl.open_run num_updates=…",
            )
            self._num_updates = last_step * updates
        if validate is None and self.generates:
            validate = self.questions(self.validation_rows)
        self.progress.last_step, self.loop = last_step, Steps(self, last_step, validate)
        return self.loop

    def sampling(self) -> AbstractContextManager[GenerationBackend]:
        """Have the generator awake with the present weights in the block, and asleep after it, as
        the trainer needs its memory. May be nested. What is sampled ahead goes on in the block, and
        after it in an engine that does not sleep.
        """
        step, generator = self.loop and self.loop.step, self.generator
        timed = step.timed("sync") if step else nullcontext()
        return self.generation.awake(generator, self.trainer, make_room=self.make_room, timed=timed)

    def make_room(self) -> None:
        """Free memory for the generator."""
        self.others.make_room([self.trainer], keep_weights=self.parts().shares_weights)
        self.others.make_room([*self.others.trained.values(), *self.others.frozen.values()])

    @property
    def backends(self) -> "dict[str, FullTrainingBackend]":
        """All backends that train, by name, the policy first."""
        return {POLICY: self.trainer, **self.others.trained}

    @property
    def updates(self) -> int:
        """Optimizer steps of all backends."""
        return sum(backend.step for backend in self.backends.values())

    def fail(self, error: BaseException) -> BaseException:
        """Notify the callbacks of an error, and return the one to raise."""
        check_writer(self.directory)
        if self.loop is not None:
            error = self.loop.leave_update(error)
        if advice := memory_advice(error):
            error.add_note(advice)
        if self.callbacks:
            callbacks.notify_of_error(self.callbacks, self, error)
        return error

    def close(self) -> None:
        self._over = True
        self.generation.close()

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
            self.progress.state = self.progress.taken = self.live.state
        return self.live

    def _loaded(self) -> Progress:
        self.parts()
        return self.progress


def _shown(rollouts: Rollouts, count: int) -> Samples:
    rows = whole_groups(rollouts.group_id.tolist(), count)
    return samples_of(rollouts, None, rows) + failures_of(rollouts, count)


class Step:
    """One step of a run: it samples, trains and logs. number: counted from 1."""

    def __init__(self, run: Run[BaseConfig], receipts: Receipts) -> None:
        self.run, self.number = run, run.state.step + 1
        self.seed = derive_seed(run.state.seed, STEP, run.state.step)
        """For random choices of the loop's own: the same after a resume."""
        self.updates = 0
        """Calls of `train`."""
        self.samples: Samples = []
        self._found, self._logs_samples = list[Rollouts](), False
        self._logged: dict[str, Metric | float] = {}
        self._learned = list[Metric | float]()
        """What `train` returned."""
        self._receipts, self._receipt = receipts, TokenReceipt()
        self.unproved = False
        """Whether it trained on tokens that nothing proves."""
        self._seconds, self._begin = dict[str, float](), time.perf_counter()
        self._timed = set[str]()
        self._tokens, self._ages = 0, Ages()
        self._synced = run.generation.updates
        self._before, self._updates = run.progress.taken, run.updates
        self._version = run.trainer.step
        if (generator := run.parts().generator) is not None:
            generator.metrics()  # resets them after the check at the start, or a validation

    def sample(
        self,
        prompts: PromptStream,
        environment: Environment | None = None,
        *,
        count: int,
        n: int = 1,
        params: SamplingParams | None = None,
    ) -> Rollouts:
        """Return `n` conversations about each of the next `count` prompts of `run.prompts()`, which
        this step trains on, led or judged by the environment or by an episode, `async def
        episode(row, policy) -> Outcome` (None: as the config says).

        The present weights sample them, or with `async.max_staleness` earlier ones, up to so many
        steps ahead. Their random numbers follow from the run's seed and the numbers of their
        groups. They are measured and logged with the step, unless the loop logs samples.

        params: None for `config.generation`'s. Raises: ValueError for a missing environment or
        other prompts; the first failure where most conversations fail.
        """
        at_least(1, count=count, n=n)
        require(
            isinstance(prompts, PromptStream),
            "prompts",
            "must be the stream that run.prompts() returns",
            type(prompts).__name__,
            "nemorl.rollout.collect.collect samples prompts that were taken by hand",
        )
        environment = environment or self.run.environment
        if environment is None:
            raise ValueError(
                "environment must judge the responses, but there is none: pass one, or give"
                " open_run a config with a reward"
            )
        params = params or self.run.config.generation.sampling_params()
        generation = self.run.generation
        stream = generation.running(
            GroupStream(prompts, environment, generation, count=count, n=n, params=params)
        )
        with self.run.sampling() as generator, self.timed("generate"):
            found = stream.next(count, generator)
        most = generation.settings.max_staleness
        self._ages.add(found.conversations, self.number, generation.synced_at, most=most)
        self._found.append(found)
        for each in found.conversations:
            self._tokens += sum(len(segment.tokens) for segment in segments_of(each.turns))
        return found

    def drop(self, rollouts: Rollouts, reason: str) -> None:
        """Count the groups of some responses as dropped for a reason, a word such as
        "uninformative": the step does not train on them. Others may be sampled in their place.
        """
        progress = self.run.progress
        progress.taken = progress.taken.drop(sorted({*rollouts.group_id.tolist()}), reason)

    def train(
        self, batch: TokenBatch, loss_fn: LossFn, *, backend: str = POLICY
    ) -> dict[str, Metric | float]:
        """Take an optimizer step on a batch, or on a part of one, and return its metrics, which are
        logged with the step (of another backend than the policy as BACKEND/metric).

        The tokens of a batch of `Rollouts.to_batch` are proved (docs/receipts.md) when the step
        ends, which raises ReceiptError where they are not the ones that were sampled.

        batch: with `loss_weights`, not 0 at the tokens to train on. backend: a name given to
        `run.backend`. Raises: ValueError for a name of none that trains.
        """
        known = self.run.backends
        require(
            backend in known,
            "backend",
            f"must name a backend that trains ({', '.join(known)})",
            backend,
            "load it by run.backend(…)",
        )
        trainer, own = known[backend], backend == POLICY
        with self.timed("train"):
            if batch.sampled_hashes is not None and batch.loss_weights is not None:
                self._receipt.expect(batch)
                batch, _ = segments_apart(replace(batch, sampled_hashes=None))
                fresh = trainer.step == self._version or batch.prev_logprobs is not None
                loss_fn = with_receipts(loss_fn, compares=own and fresh)
            else:
                self.unproved |= batch.generation_logprobs is not None
            metrics = trainer.train_step(batch, loss_fn)
        self.updates += 1
        rest = self._receipt.add(metrics)
        self.log(rest if own else {f"{backend}/{name}": each for name, each in rest.items()})
        self._learned += rest.values()
        return rest

    def log(
        self,
        metrics: Mapping[str, Metric | float],
        samples: Rollouts | Samples | None = None,
    ) -> None:
        """Log measurements of this step: numbers, or metrics of a training step, of which those of
        one name are combined; a number of that name becomes environment/NAME. What `train` returned
        is logged already. samples: for the sample log; `Rollouts` are measured as well.
        """
        self._logs_samples |= samples is not None
        ours = {id(each) for each in self._learned if isinstance(each, Metric)}
        metrics = {name: each for name, each in metrics.items() if id(each) not in ours}
        if isinstance(samples, Rollouts):
            self.log({**compared(samples, self.run.config), **by_set(samples, self.run.train_sets)})
            samples = _shown(samples, self.run.config.run.samples_per_step)
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
        """Add the seconds of the block, if it is not in another of that part, to seconds_PART."""
        if part in self._timed:
            yield
            return
        start = time.perf_counter()
        self._timed.add(part)
        try:
            yield
        finally:
            self._timed.remove(part)
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    @property
    def trained(self) -> int:
        """Updates of all backends in this step, in `train` or by the loop itself."""
        return max(self.updates, self.run.updates - self._updates)

    @property
    def used(self) -> bool:
        """Whether anything has been logged, learned or taken."""
        return bool(self.trained or self._logged) or self.run.progress.taken != self._before

    def end(self) -> dict[str, float]:
        """Check the receipts, and return the step's metrics."""
        self.unproved |= bool(self._tokens) and self.trained > self.updates
        held = {name: value for name, value in self._logged.items() if isinstance(value, Metric)}
        seen = self._receipt.seen
        read = in_main_memory({**held, **seen})  # at once: each copy waits for the device
        self._logged |= {name: read[name] for name in held}
        self._receipt.seen = {name: read[name] for name in seen}
        self.log(self._receipt.check(self._receipts, self.number, stale=self._ages.oldest > 0))
        if self._found and not self._logs_samples:
            first = self._found[0]
            kind = first.kind, [*first.components]
            alike = [each for each in self._found if (each.kind, [*each.components]) == kind]
            self.log({}, samples=join(alike))
        if self._tokens:
            measured = self.run.generator.metrics()
            self.log({f"generation/{name}": value for name, value in measured.items()})
            if any(name.endswith("/restarts") for name in measured):  # of engines' processes
                updates = float(self.run.generation.updates - self._synced)
                self.log({"generation/weights/updates": updates})
        found = {
            name: each.finalize() if isinstance(each, Metric) else float(each)
            for name, each in self._logged.items()
        }
        seconds = time.perf_counter() - self._begin
        found |= self._ages.metrics()
        parts = {f"seconds_{name}": took for name, took in self._seconds.items()}
        tokens = self._tokens or found.get("num_tokens", 0.0)
        return beside({"seconds": seconds, **parts, "tokens_per_second": tokens / seconds}, found)


class Steps(Iterator[Step]):
    def __init__(self, run: Run[BaseConfig], last_step: int, validate: Validate | None) -> None:
        self.run, self.last_step, self.validate = run, last_step, validate
        self.step: Step | None = None
        self._stop = self._ended = self.begun = False
        self._update, self._passed = ExitStack(), -1
        self._receipts = Receipts(getattr(run.config, "receipts", ReceiptsConfig()))
        self._warned = False
        self._validated = 0
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
        self.step = step = Step(self.run, self._receipts)
        self._update.enter_context(callbacks.update_in_progress(lambda: step.trained > 0))
        return step

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
        if self.run.generation.settings.max_staleness and not self.run.generation.streams:
            warn(
                "async.max_staleness is set, but the loop sampled from no stream, so nothing was"
                " sampled ahead: call step.sample(run.prompts(), count=…)"
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
        backends.stack.enter_context(callbacks.closing(own))
        self.begun = True
        self._validated = run.state.step
        if self._validated >= self.last_step:
            warn(
                f"the run has {self._validated} steps already, so there is nothing to do up to step"
                f" {self.last_step}: raise max_num_steps"
            )
        self._call("on_train_begin")
        if self.validate and run.config.run.val_at_start and self._validated == 0:
            self._validation()

    def _finish_step(self) -> None:
        step = self.step
        if step is None:
            return
        try:
            with self._update:
                self._metrics = step.end()
                if step.unproved and not self._warned:
                    self._warned = True
                    warn(
                        f"step {step.number} trained on tokens that nothing proves to be the ones"
                        " sampled: make the batch by groups.to_batch(…), and call step.train in"
                        " place of run.trainer.train_step"
                    )
                self.step = None  # though a full disk may end the loop here
                self._close_groups()
            number, period = self.run.state.step, self.run.config.run.val_period
            if self.validate and (number == self.last_step or (period and number % period == 0)):
                answers = self._validation()
                step.samples = step.samples or answers
        finally:
            if self.run.state.step == step.number:
                with callbacks.update_in_progress():
                    try:
                        if step.samples:
                            self._call("on_samples", step.number, step.samples)
                    finally:  # the last hook of a step: a checkpoint covers all recorded before it
                        self._call("on_step_end", step.number, self._metrics)
        for passed in range(self._passed, self._epoch()):
            if passed != self._passed:
                self._call("on_epoch_begin", passed)
            self._call("on_epoch_end", passed, self._metrics)

    def _close_groups(self) -> None:
        progress = self.run.progress
        state, groups = progress.taken.advance()
        if any(groups.values()):
            self._metrics = {**self._metrics, "groups_trained": float(len(groups["trained"]))}
            self.run.launch.directory.append_groups(state.step, groups)
        progress.state = progress.taken = state  # which a checkpoint has after groups.jsonl

    def _epoch(self) -> int:
        state = self.run.state
        open_ones = sum(group.stream == "train" for group in state.open_groups)
        return (state.cursors.get("train", 0) - open_ones) // self.run.num_rows.get("train", 1)

    def _validation(self) -> Samples:
        assert self.validate is not None
        measured, answers = self.validate()
        self._validated = self.run.state.step
        self._call("on_validation_end", self._validated, measured)
        return answers

    def _call(self, hook: str, *args: Any) -> None:
        try:
            callbacks.notify(self.run.callbacks, hook, self.run, *args)
        except callbacks.StopTraining:
            self._stop = True

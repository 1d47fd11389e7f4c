"""Groups of responses, sampled ahead of their steps, and when a run's generator is awake."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nemorl.checks import at_least, require, warn
from nemorl.rollout.admission import Ended, Group, LoopState, Order, Updated, Wanted, decide
from nemorl.rollout.collect import MOST_FAILED, Rollouts, as_rollouts
from nemorl.rollout.conversation import Conversation, Prompts
from nemorl.rollout.driver import Driver
from nemorl.rollout.environments import Environment
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.grpo import AsyncConfig, OnlineConfig
from nemorl.runtime.engines.weights import HasWeights, sync_weights
from nemorl.runtime.store.files import check_writer


class Progress:
    """Where a loop is: after its last finished step, and with what it has taken since."""

    def __init__(self, state: LoopState) -> None:
        self.state = self.taken = state
        self.last_step: int | None = None
        """Once the loop begins."""


@dataclass(frozen=True)
class RowStream:
    """Indices of rows in a seeded order that goes on where the last checkpoint left it."""

    load: Callable[[], Progress]
    """Loads the last checkpoint on first use."""
    order: Order
    name: str

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    def next(self, count: int) -> list[int]:
        """Return the next `count` rows' indices; a new epoch begins where one ends."""
        at_least(1, count=count)
        progress = self.load()
        progress.taken, rows = progress.taken.take(self.name, self.order, count)
        return rows


@dataclass(frozen=True)
class PromptStream:
    """Prompts in a seeded order, each with the number of its group in the run."""

    prompts: Prompts
    rows: RowStream

    def __len__(self) -> int:
        return len(self.prompts)

    def next(self, count: int) -> Prompts:
        """Return the next `count` prompts, to sample by hand (`Step.sample` takes its own): of the
        present step, or of the next if taken before it.
        """
        at_least(1, count=count)
        rows, progress = self.rows, self.rows.load()
        step = progress.state.step + 1
        progress.taken, groups = progress.taken.take_groups(rows.name, rows.order, count, step=step)
        return self.of(groups)

    def of(self, groups: Sequence[Group]) -> Prompts:
        rows, taken = self.rows, [group.row for group in groups]
        require(
            max(taken) < rows.num_rows,
            f"the prompts of {rows.name!r}",
            f"must have the rows of the open groups, up to number {max(taken) + 1}",
            rows.num_rows,
            "resume with the data of that run",
        )
        return replace(self.prompts.take(taken), groups=[group.ordinal for group in groups])


class GroupStream:
    """Groups of responses, `count` a step in prompt order, sampled up to async.max_staleness steps
    ahead.
    """

    def __init__(
        self,
        prompts: PromptStream,
        environment: Environment,
        generation: "Generation",
        *,
        count: int,
        n: int,
        params: SamplingParams,
    ) -> None:
        self.prompts, self.environment = prompts, environment
        self.count, self.n, self.params = count, n, params
        self.progress, self.settings = generation.progress, generation.settings
        self._generation = generation
        self.driver: Driver
        """From the first `next` on."""
        self._running: dict[int, Prompts] = {}
        """By ordinal: streamed rows can't be read twice."""
        self._ended: dict[int, list[Conversation]] = {}
        self._failed: BaseException | None = None

    def next(self, count: int, generator: GenerationBackend) -> Rollouts:
        """Return the responses to the next `count` prompts, which the present step trains on.

        generator: awake. Raises: the first failure where most conversations fail.
        """
        groups = self._wait_for(count, generator)
        talks = [each for group in groups for each in self._ended.pop(group)]
        try:
            timeout_s = self.prompts.prompts.limits.timeout_s
            found = as_rollouts(talks, self.environment, self.params, timeout_s=timeout_s)
        except Exception:  # from which a loop may go on
            self._drop(groups)
            raise
        if failed := {*groups} - {*found.group_id.tolist()}:
            self._drop(sorted(failed))
        return found

    def before_update(self) -> None:
        if self.settings.in_flight == "abort":
            self.driver.stop([*self._running])
            for ended in self.driver.ended():
                self._end(*ended)

    def after_update(self, *, changed: bool) -> None:
        self.driver.resume()
        self._feed(Updated(again=changed and self.settings.in_flight == "abort"))

    def _wait_for(self, count: int, generator: GenerationBackend) -> tuple[int, ...]:
        if self._failed is not None:
            raise RuntimeError(
                "step.sample must not go on after sampling ahead has failed: resume the run"
            ) from self._failed
        ahead, taken = self.settings.max_staleness > 0, self.progress.taken
        streams = self._generation.streams
        with ExitStack() as stack:
            try:
                if not ahead or self not in streams:
                    self.driver = Driver(
                        generator,
                        self.environment,
                        replace(self.params, n=self.n),
                        seed=taken.seed,
                        most_failed=1.0 if ahead else MOST_FAILED,
                        ahead=ahead and not self._generation.rests,
                    )
                    streams.append(self) if ahead else stack.callback(self.driver.close)
                    self._feed(Updated())
                self.driver.resume()
                given = self._feed(Wanted(count))
                while not given:
                    given = self._end(*self.driver.next_ended())
            except BaseException as error:
                self._failed = error if ahead else None
                self.progress.taken = taken  # a loop may ask again
                self._running.clear()
                raise
        return given

    def _drop(self, failed: Sequence[int]) -> None:
        self.progress.taken = self.progress.taken.drop(failed, "failed")

    def _end(self, groups: tuple[int, ...], talks: list[Conversation]) -> tuple[int, ...]:
        if not self._running.keys() >= {*groups}:  # they were stopped
            return ()
        for group in groups:
            del self._running[group]
            self._ended[group] = []
        for each in talks:
            self._ended[each.group].append(each)
        return self._feed(Ended(groups))

    def _feed(self, event: Wanted | Ended | Updated) -> tuple[int, ...]:
        rows = self.prompts.rows
        self.progress.taken, actions = decide(
            self.progress.taken,
            event,
            stream=rows.name,
            order=rows.order,
            batch=self.count,
            staleness=self.settings.max_staleness,
            last=self.progress.last_step,
        )
        if actions.stop:
            warn(
                "groups became older than async.max_staleness before a step took them, and are"
                f" dropped: sample {self.count} groups in each step, or fewer in the first"
                " (count=…)"
            )
            self.driver.stop(actions.stop)
            for group in actions.stop:
                self._running.pop(group, None)
                self._ended.pop(group, None)
        again = [g for g in actions.begin if g.ordinal in self._running]
        cohorts = [self._running[group.ordinal] for group in again]
        if new := [group for group in actions.begin if group not in again]:
            prompts = self.prompts.of(new)
            each = [prompts.take([place]) for place in range(len(new))]
            cohorts += each if self.settings.max_staleness else [prompts]  # judged together
        self._running |= {group: each for each in cohorts for group in each.groups}
        if cohorts:
            self.driver.begin(cohorts)
        return actions.give


class Generation:
    """A run's generator between the trainer's steps, and the streams that sample ahead."""

    def __init__(self, progress: Progress, config: BaseConfig, directory: Path) -> None:
        self.progress, self.directory = progress, directory
        self.settings = config.async_ if isinstance(config, OnlineConfig) else AsyncConfig()
        self.streams: list[GroupStream] = []
        self.synced: dict[int, int] = {}
        """Finished steps when the generator last got a version of the weights, by version."""
        self.updates = 0
        """How often the generator got new weights."""
        self.rests = self.settings.max_staleness > 0 and config.generation.traits.embedded
        """Whether it samples ahead with the trainer's own weights, and rests in between."""
        self._awake = False

    def running(self, new: GroupStream) -> GroupStream:
        """Return the stream that samples the same prompts ahead, if any, in place of a new one."""
        name = new.prompts.rows.name
        for old in self.streams:
            if old.prompts.rows.name == name:
                require(
                    (old.environment, old.n, old.params) == (new.environment, new.n, new.params),
                    f"step.sample of {name!r}",
                    "must have the same environment, n and params in each step, if sampled ahead",
                    f"n={new.n}",
                    "sample others from a stream of their own, run.prompts(name=…)",
                )
                return old
        return new

    @contextmanager
    def awake(
        self,
        generator: GenerationBackend,
        trainer: HasWeights,
        *,
        make_room: Callable[[], None],
        timed: AbstractContextManager[None],
    ) -> Iterator[GenerationBackend]:
        """Have the generator awake in the block (`Run.sampling`). timed: measures how long it
        takes to wake.
        """
        nested = self._awake
        with timed:
            if not nested:
                make_room()
                if not self.rests:  # whose tokens would have new weights and the old version
                    generator.wake()
            changed = self._update(generator, trainer)
            if self.rests:
                generator.wake()
            for stream in self.streams if changed or not nested else ():
                stream.after_update(changed=changed)
        self._awake = True
        try:
            yield generator
        finally:
            check_writer(self.directory)  # after rewards, and before an engine is called
            self._awake = nested
            if not nested or self.rests:
                for stream in self.streams if generator.sleeps else ():
                    stream.driver.pause()
                generator.sleep()

    def synced_at(self, version: int) -> int:
        """Return the finished steps when the generator got a version of the weights, or the one
        before: a replica that came back between minibatches has one in between.
        """
        known = [each for each in self.synced if each <= version]
        if not known or version > max(self.synced):
            raise RuntimeError(
                f"tokens must carry a version of the trainer's weights, but the engine gave"
                f" {version}: give completions that of the last update_weights"
            )
        return self.synced[max(known)]

    def close(self) -> None:
        for stream in self.streams:
            stream.driver.close()

    def _update(self, generator: GenerationBackend, trainer: HasWeights) -> bool:
        changed = generator.policy_version != trainer.step
        for stream in self.streams if changed else ():
            stream.before_update()
        waits = self.settings.in_flight == "wait" and self.streams
        sync_weights(trainer, generator, in_flight="wait" if waits else "keep")
        self.synced[trainer.step] = self.progress.state.step
        self.updates += changed
        return changed

"""Groups of responses, sampled ahead of their steps, and when a run's generator is awake."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from nemorl.checks import warn
from nemorl.rollout.admission import (
    Action,
    Admission,
    Begin,
    Drop,
    Dropped,
    Event,
    Finished,
    Hand,
    Trained,
    Updated,
    Wanted,
    decide,
)
from nemorl.rollout.background import Background
from nemorl.rollout.collect import Rollouts, as_rollouts
from nemorl.rollout.conversation import Conversation, Prompts
from nemorl.rollout.environments import Environment
from nemorl.rollout.generation import GenerationBackend, HasEngines, SamplingParams
from nemorl.runtime.config.grpo import AsyncConfig
from nemorl.runtime.engines.weight_sync import sync_weights
from nemorl.runtime.store.files import check_writer


class GroupStream:
    """Groups of responses in the order of their prompts, `count` for each step.

    With async.max_staleness K of 1 or more they are sampled up to K steps ahead; with 0, `next`
    samples them.
    """

    def __init__(
        self,
        run: Any,
        prompts: Any,
        environment: Environment,
        *,
        count: int,
        n: int,
        params: SamplingParams,
    ) -> None:
        self.run, self.prompts, self.environment = run, prompts, environment
        self.count, self.n, self.params = count, n, params
        self.settings: AsyncConfig = getattr(run.config, "async_", AsyncConfig())
        self._admission = Admission(staleness=self.settings.max_staleness, batch=count)
        self._background: Background | None = None
        self._prompts: dict[int, Prompts] = {}
        """Prompts of open groups by their place in the stream, with their numbers in the run."""
        self._found: dict[int, list[Conversation]] = {}
        """Conversations of groups that are done, by place."""
        self._handed: Sequence[int] | None = None
        self._failed: BaseException | None = None
        """What ended the sampling ahead."""
        self._warned = False

    def next(self, count: int | None = None) -> Rollouts:
        """Return the responses to the next `count` prompts (None: the stream's), which the present
        step trains on.

        Raises: RuntimeError outside of a step; the first failure where most conversations fail.
        """
        step, count = self.run.step, count or self.count
        groups: Sequence[int] = ()
        try:
            if self.settings.max_staleness:
                groups, talks = self._taken(count)
                found = as_rollouts(talks, self.environment, self.params)
            else:
                prompts = self.prompts.next(count)
                groups = prompts.groups
                found = step.sample(prompts, self.environment, n=self.n, params=self.params)
        except Exception:  # from which a loop may go on
            if groups:
                self._drop(groups, "failed")
            raise
        step.aged(found.conversations, most=self.settings.max_staleness)
        if failed := {*groups} - {*found.group_id.tolist()}:
            self._drop(sorted(failed), "failed")
        return found

    def _taken(self, count: int) -> tuple[Sequence[int], list[Conversation]]:
        step = self.run.step
        with self.run.sampling(), step.timed("generate"):
            try:
                places = self._wait_for(count)
            except BaseException as error:
                self._failed = self._failed or error
                raise
        groups = [self._prompts[place].groups[0] for place in places]
        self.run.taken = self.run.taken.assign(groups)
        talks = [each for place in places for each in self._found.pop(place)]
        step.count(talks)
        return groups, talks

    def _wait_for(self, count: int) -> Sequence[int]:
        if self._failed is not None:
            raise RuntimeError(
                "run.groups must not be read after sampling ahead has failed: resume the run from"
                " its last checkpoint"
            ) from self._failed
        if self._background is None:
            self._background = Background(
                self.run.generator,
                self.environment,
                replace(self.params, n=self.n),
                seed=self.run.state.seed,
            )
            self.after_update(changed=False)
        self._background.resume()
        self._feed(Wanted(count))
        while self._handed is None:
            self._note(*self._background.next_ended())
        places, self._handed = self._handed, None
        return places

    def drop(self, rollouts: Rollouts, reason: str) -> None:
        """Count the groups of some responses as dropped: the step does not train on them. Others
        may be taken in their place.

        reason: a word, such as "uninformative".
        """
        self._drop(sorted({*rollouts.group_id.tolist()}), reason)

    def _drop(self, groups: Sequence[int], reason: str) -> None:
        self.run.taken = self.run.taken.drop(groups, reason)
        if self._background is not None:
            places = [p for p, each in self._prompts.items() if each.groups[0] in groups]
            self._forget(places)
            self._feed(Dropped(tuple(places)))

    def before_update(self) -> None:
        if self._background is None or self.settings.in_flight != "abort":
            return
        self._background.stop([*self._in_flight()])
        for group, talks in self._background.ended():
            self._note(group, talks)

    def _in_flight(self) -> dict[int, int]:
        open_ones = [group.number for group in self._admission.open if not group.done]
        return {self._prompts[place].groups[0]: place for place in open_ones}

    def after_update(self, *, changed: bool) -> None:
        if self._background is None:  # nobody has asked for groups yet
            return
        state = replace(self._admission, step=self.run.state.step, last=self.run.num_steps)
        self._admission = state
        self._background.resume()
        self._feed(Updated(again=changed and self.settings.in_flight == "abort"))

    def pause(self) -> None:
        if self._background is not None:
            self._background.pause()

    def end_step(self) -> None:
        if self._background is not None:
            self._forget([group.number for group in self._admission.open if group.handed])
            self._feed(Trained())

    def close(self) -> None:
        if self._background is not None:
            self._background.close()

    def _note(self, group: int, talks: list[Conversation]) -> None:
        place = self._in_flight().get(group)
        if place is not None:
            self._found[place] = talks
            self._feed(Finished(place))

    def _feed(self, event: Event) -> None:
        self._admission, actions = decide(self._admission, event)
        self._act(actions)

    def _act(self, actions: Iterable[Action]) -> None:
        assert self._background is not None
        begun = [action.number for action in actions if isinstance(action, Begin)]
        new = [place for place in begun if place not in self._prompts]
        if new:
            prompts = self.prompts.ahead(len(new))
            self._prompts |= {place: prompts.take([i]) for i, place in enumerate(new)}
        for action in actions:
            match action:
                case Drop(number, reason):
                    group = self._prompts[number].groups[0]
                    if not self._warned:
                        self._warned = True
                        warn(
                            f"group {group} became older than async.max_staleness before a step"
                            f" took it, and is dropped: take the {self.count} groups of run.groups"
                            " in each step, or say fewer (count=…)"
                        )
                    self._background.stop([group])
                    self.run.taken = self.run.taken.drop([group], reason)
                    self._forget([number])
                case Hand(numbers):
                    self._handed = numbers
        if begun:
            self._background.begin([self._prompts[place] for place in begun])

    def _forget(self, places: Iterable[int]) -> None:
        for place in places:
            self._prompts.pop(place, None)
            self._found.pop(place, None)


class Sampler:
    """The generator of a run between the trainer's steps, and the streams that sample ahead."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.streams: list[GroupStream] = []
        self.synced: dict[int, int] = {}
        """Finished steps when the generator last got a version of the weights, by version."""
        self.ahead = hasattr(run.config, "async_") and run.config.async_.max_staleness > 0
        """Whether the run samples ahead."""
        self._awake = False

    @contextmanager
    def awake(self) -> Iterator[GenerationBackend]:
        """See `Run.sampling`."""
        run, nested = self.run, self._awake
        generator: GenerationBackend = run.generator
        # Of what is in flight, no token may have the trainer's new weights and the old version:
        # where the engine computes with them, it wakes with the new one, and rests in between.
        later = self.ahead and run.config.generation.traits.embedded
        with nullcontext() if run.present is None else run.present.timed("sync"):
            if not nested:
                run.make_room()
                if not later:
                    generator.wake()
            changed = self._update(generator)
            if later:
                generator.wake()
            for stream in self.streams if changed or not nested else ():
                stream.after_update(changed=changed)
        self._awake = True
        try:
            yield generator
        finally:
            check_writer(run.directory)  # after rewards, and before an engine is called
            self._awake = nested
            if not nested or later:
                self._rest(generator)

    def synced_at(self, version: int) -> int:
        """Return the finished steps when the generator got a version of the weights; one between
        two, of a replica that came back between minibatches, counts as the older.
        """
        if version in self.synced:
            return self.synced[version]
        known = [each for each in self.synced if each < version]
        if not known or version > max(self.synced):
            raise RuntimeError(
                f"tokens must carry a version of the trainer's weights, but the engine gave"
                f" {version}: completions have policy_versions of the last update_weights"
            )
        return self.synced[max(known)]

    def end_step(self) -> None:
        for stream in self.streams:
            stream.end_step()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def _update(self, generator: GenerationBackend) -> bool:
        run = self.run
        changed = generator.policy_version != run.trainer.step
        for stream in self.streams if changed else ():
            stream.before_update()
        waits = any(stream.settings.in_flight == "wait" for stream in self.streams)
        sync_weights(run.trainer, generator, in_flight="wait" if waits else "keep")
        self.synced[run.trainer.step] = run.state.step
        if changed and run.present is not None:
            run.present.sent += 1
        return changed

    def _rest(self, generator: GenerationBackend) -> None:
        goes_on = isinstance(generator, HasEngines) and not generator.sleeps
        for stream in () if goes_on else self.streams:
            stream.pause()
        generator.sleep()

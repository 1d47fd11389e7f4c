"""The driver of conversations, on an event loop in a thread of its own."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from itertools import product
from queue import Empty, SimpleQueue
from typing import Any

from nemorl.checks import warn
from nemorl.rollout.calls import BatchCalls, EventLoop
from nemorl.rollout.cohort import Cohort
from nemorl.rollout.conversation import Conversation, EnvironmentTimeout, Failure, Limits, Prompts
from nemorl.rollout.episodes import (
    Environment,
    check_environment,
    episode_of,
    judge_of,
    judged,
    named,
    parts_of,
    places_of,
)
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from nemorl.rollout.scheduler import WAITING

ATTEMPTS = 3
"""How often a conversation is begun at most, where its group needs it and it fails."""
THREADS = 64
"""Calls of environments' methods that block, at a time."""
STOP_S = 30.0
"""Longest wait for the end of what is in flight."""
LOOK_S = 1.0
"""How often the driver looks whether user code blocks the event loop."""
Groups = tuple[int, ...]
_Ended = tuple[Groups, list[Conversation] | BaseException]


class Driver:
    """Leads conversations, `sampling.n` about each prompt, while the caller waits or trains.

    Prompts that are begun together are a cohort: their conversations are judged together, those of
    each environment, and end as a whole.
    """

    def __init__(
        self,
        generator: GenerationBackend,
        environment: Environment,
        sampling: SamplingParams,
        *,
        seed: int,
        most_failed: float = 1.0,
        ahead: bool = False,
    ) -> None:
        """most_failed: share of a cohort above which no failed conversation begins again.

        ahead: whether an engine in this process computes in the driver's thread, though nobody
        waits.
        """
        parts = parts_of(environment)
        for each in parts.values():
            check_environment(each)
        self.generator, self.environment = generator, environment
        self._awake = asyncio.Event()
        self.sampling, self.seed, self.most_failed = sampling, seed, most_failed
        self._judges = {name: _calls(judge_of(each)) for name, each in parts.items()}
        self._free = asyncio.Semaphore(THREADS)
        self._tasks: dict[Groups, asyncio.Task[None]] = {}
        self._ended: SimpleQueue[_Ended | Callable[[], None]] = SimpleQueue()
        """With steps of an engine for the thread that waits."""
        self._ahead = ahead
        self._loop = EventLoop("nemorl-rollouts", lambda error: self._ended.put(((), error)))
        self._limit_s = Limits().timeout_s
        self._closed = self._blocked = False

    def begin(self, prompts: Sequence[Prompts]) -> None:
        self._do(self._begin(prompts))

    def resume(self) -> None:
        self._do(self._set_awake(True))

    def pause(self) -> None:
        self._do(self._set_awake(False))

    def stop(self, groups: Sequence[int]) -> None:
        """End the cohorts of groups without a result."""
        self._do(self._stop(lambda cohort: not {*cohort}.isdisjoint(groups)))

    def next_ended(self) -> tuple[Groups, list[Conversation]]:
        """Return the numbers of a cohort's groups and its conversations, once it has ended.

        Raises: an error of the engine; EnvironmentTimeout for user code that blocks the event loop.
        """
        while True:
            try:
                ended = self._ended.get(timeout=LOOK_S)
            except Empty:
                self._check_loop()
                continue
            if found := _found(ended):
                return found

    def ended(self) -> list[tuple[Groups, list[Conversation]]]:
        ended = [self._ended.get() for _ in range(self._ended.qsize())]
        return [found for each in ended if (found := _found(each))]

    def close(self) -> None:
        """End what is in flight. May be repeated."""
        if self._closed:
            return
        self._closed = True
        if not self._blocked:
            self._do(self._stop(lambda _: True))
        self._loop.close()
        self._loop.thread.join(0 if self._blocked else STOP_S)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        while not wait([future], LOOK_S).done:
            self._check_loop()
        future.result()

    def _check_loop(self) -> None:
        if self._loop.blocked(self._limit_s):
            self._blocked = True
            raise EnvironmentTimeout(
                f"{named(self.environment)} must not block the event loop for {self._limit_s:g} s"
                " (rollout.timeout_s), but did: await what takes long, or call it by"
                " asyncio.to_thread"
            )

    async def _set_awake(self, awake: bool) -> None:
        self._awake.set() if awake else self._awake.clear()

    async def _begin(self, prompts: Sequence[Prompts]) -> None:
        if not self._ahead:
            WAITING.set(self._ended.put)  # of the tasks that are made here
        for judge in filter(None, self._judges.values()):
            judge.renew()
        for each in prompts:
            self._limit_s = each.limits.timeout_s
            self._tasks[tuple(each.groups)] = asyncio.create_task(self._lead(each))

    async def _stop(self, which: Callable[[Groups], bool]) -> None:
        tasks = [self._tasks.pop(cohort) for cohort in [*filter(which, self._tasks)]]
        for task in tasks:
            task.cancel()
        late = (await asyncio.wait(tasks, timeout=STOP_S))[1] if tasks else ()
        if late:
            warn(
                f"{len(late)} conversation groups still run {STOP_S:g} s after they were cancelled:"
                " an environment closes slowly, or does not let asyncio.CancelledError pass"
            )

    async def _lead(self, prompts: Prompts) -> None:
        groups, task = tuple(prompts.groups), asyncio.current_task()
        found: list[Conversation] | BaseException
        try:
            found = await self._conversations(prompts)
        except asyncio.CancelledError as error:
            found = RuntimeError("a conversation was cancelled by its own environment or episode")
            found.__cause__ = error
        except BaseException as error:
            found = error
        if self._tasks.get(groups) is task:  # else `stop` cancelled it
            del self._tasks[groups]
            self._ended.put((groups, found))

    async def _conversations(self, prompts: Prompts) -> list[Conversation]:
        """Return conversations row by row. Those of `_missing` begin again with another seed."""
        places = [*product(range(len(prompts)), range(self.sampling.n))]
        found: dict[tuple[int, int], Conversation] = {}
        missing = places
        for attempt in range(ATTEMPTS):
            rows = [prompts.rows[index] for index, _ in missing]
            parts = places_of(self.environment, rows).items()
            mine = [(name, [missing[i] for i in each]) for name, each in parts]
            try:
                async with asyncio.TaskGroup() as group:
                    led = [group.create_task(self._led(prompts, *each, attempt)) for each in mine]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            for (_, each), task in zip(mine, led, strict=True):
                found |= zip(each, task.result(), strict=True)
            if not (missing := self._missing(found)):
                break
        return [found[place] for place in places]

    async def _led(
        self, prompts: Prompts, name: str | None, places: Sequence[tuple[int, int]], attempt: int
    ) -> list[Conversation]:
        environment = parts_of(self.environment)[name]
        tools = getattr(environment, "tools", ()) if prompts.shows_tools else prompts.tools
        cohort = Cohort(
            generator=self.generator,
            awake=self._awake,
            prompts=replace(prompts, tools=tools),
            sampling=self.sampling,
            seed=self.seed,
            name=named(environment),
            judge=self._judges[name],
            free=self._free,
            attempt=attempt,
        )
        episode = episode_of(environment, cohort)
        return await cohort.run(episode, places, timed=episode is environment)

    def _missing(self, found: Mapping[tuple[int, int], Conversation]) -> list[tuple[int, int]]:
        """Return the failed members of groups in which less than two are left to compare."""
        failed = [place for place, each in found.items() if isinstance(each.outcome, Failure)]
        if len(failed) > self.most_failed * len(found):
            return []
        left = Counter(index for index, _ in found.keys() - {*failed})
        return [place for place in failed if left[place[0]] < min(2, self.sampling.n)]


def _calls(judge: Any) -> BatchCalls | None:
    if judge is None:
        return None
    return BatchCalls(
        partial(judged, judge),
        f"{named(judge)}: step",
        each_alone=getattr(judge, "each_alone", False),
    )


def _found(item: _Ended | Callable[[], None]) -> tuple[Groups, list[Conversation]] | None:
    """Return a cohort that has ended, or do a step of an engine. Raises: the cohort's error."""
    if not isinstance(item, tuple):
        return item()
    groups, found = item
    if isinstance(found, BaseException):
        raise found
    return groups, found

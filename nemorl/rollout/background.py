"""Conversations that go on while the caller does something else, such as a trainer's step."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from nemorl.checks import warn
from nemorl.rollout.conversation import Conversation, Prompts
from nemorl.rollout.episodes import Environment, check_environment, converse_beside
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.rounds import Rounds

STOP_S = 30.0
"""Longest wait for their end."""


class _Awake:
    """A generator whose new requests wait while it sleeps."""

    def __init__(self, generator: GenerationBackend) -> None:
        self.engine, self.awake = generator, asyncio.Event()

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        while not self.awake.is_set():  # it may sleep again before this task goes on
            await self.awake.wait()
        return await self.engine.sample(prompt, params)


class Background:
    """Groups of conversations on an event loop in a thread of its own, on which an engine in this
    process computes.
    """

    def __init__(
        self,
        generator: GenerationBackend,
        environment: Environment,
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> None:
        check_environment(environment)
        self.generator, self.environment = _Awake(generator), environment
        self.sampling, self.seed = sampling, seed
        self._rounds = Rounds()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: SimpleQueue[tuple[int, list[Conversation] | BaseException]] = SimpleQueue()
        self._loop, self._closing = asyncio.new_event_loop(), False
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._run, args=[device], name="nemorl-rollouts", daemon=True
        )
        self._thread.start()

    def begin(self, prompts: Sequence[Prompts]) -> None:
        self._do(self._begin(prompts))

    def resume(self) -> None:
        self._do(self._resume())

    def pause(self) -> None:
        self._do(self._pause())

    def stop(self, groups: Sequence[int]) -> None:
        """End groups without a result."""
        self._do(self._stop(groups))

    def next_ended(self) -> tuple[int, list[Conversation]]:
        """Wait for a group that has ended. Raises an error of the engine."""
        group, found = self._ended.get()
        if isinstance(found, BaseException):
            raise found
        return group, found

    def ended(self) -> list[tuple[int, list[Conversation]]]:
        return [self.next_ended() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """End what is in flight. May be repeated."""
        if self._loop.is_closed():
            return
        self._do(self._stop([*self._tasks]))
        self._do(self._stop_all())
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, device: int | None) -> None:
        if device is not None:  # each thread has a current one of its own
            torch.cuda.set_device(device)
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException as error:  # sys.exit in a task of user code, which ends the loop
                self._ended.put((-1, error))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _resume(self) -> None:
        self.generator.awake.set()

    async def _pause(self) -> None:
        self.generator.awake.clear()

    async def _begin(self, prompts: Sequence[Prompts]) -> None:
        self._rounds.renew()
        for each in prompts:
            self._tasks[each.groups[0]] = asyncio.create_task(self._converse(each))

    async def _stop(self, groups: Sequence[int]) -> None:
        tasks = [self._tasks.pop(group) for group in groups if group in self._tasks]
        for task in tasks:
            task.cancel()
        late = (await asyncio.wait(tasks, timeout=STOP_S))[1] if tasks else ()
        if late:
            warn(
                f"{len(late)} conversation groups still run {STOP_S:g} s after they were cancelled:"
                " an environment closes slowly, or catches asyncio.CancelledError and does not"
                " raise it again"
            )

    async def _stop_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _converse(self, prompts: Prompts) -> None:
        (group,) = prompts.groups
        found: list[Conversation] | BaseException
        try:
            found = await converse_beside(
                self.generator,
                self.environment,
                prompts,
                self.sampling,
                seed=self.seed,
                beside=self._rounds,
            )
        except asyncio.CancelledError as error:
            if self._tasks.get(group) is not asyncio.current_task():  # `_stop` did it
                raise
            found = RuntimeError("a conversation was cancelled by its own environment or episode")
            found.__cause__ = error
        except BaseException as error:
            found = error
        if self._tasks.get(group) is not asyncio.current_task():  # it ended after `_stop`
            return
        del self._tasks[group]
        self._ended.put((group, found))

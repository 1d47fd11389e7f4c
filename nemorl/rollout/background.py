"""Conversations that go on while the caller does something else, such as a trainer's step."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from nemorl.rollout.conversation import Conversation
from nemorl.rollout.episodes import Environment, check_environment, converse_beside
from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams
from nemorl.rollout.prompts import Prompts
from nemorl.rollout.rounds import Rounds


class _Awake:
    """A generator whose new requests wait while it sleeps."""

    def __init__(self, generator: GenerationBackend) -> None:
        self.engine, self.awake = generator, asyncio.Event()

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        while not self.awake.is_set():  # it may sleep again before this task goes on
            await self.awake.wait()
        return await self.engine.sample(prompt, params)


class Background:
    """Groups of conversations on an event loop in a thread of its own.

    An engine in this process computes on that thread while it is awake. Functions of batches, such
    as rewards, are called for a group at a time, one call after the other, in other threads.
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
        self._loop = asyncio.new_event_loop()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._run, args=[device], name="nemorl-rollouts", daemon=True
        )
        self._thread.start()

    def begin(self, prompts: Sequence[Prompts]) -> None:
        """Begin the conversations about each prompt, which has the number of its group."""
        self._do(self._begin(prompts))

    def resume(self) -> None:
        """Let requests go to the generator, which is awake."""
        self._do(self._resume())

    def pause(self) -> None:
        """Have new requests wait, before the generator sleeps."""
        self._do(self._pause())

    def stop(self, groups: Sequence[int]) -> None:
        """End groups that are in flight, without a result."""
        self._do(self._stop(groups))

    def next_ended(self) -> tuple[int, list[Conversation]]:
        """Wait for a group that has ended, and return its number and conversations.

        Raises what ended it: an error of the engine.
        """
        group, found = self._ended.get()
        if isinstance(found, BaseException):
            raise found
        return group, found

    def ended(self) -> list[tuple[int, list[Conversation]]]:
        """Return the groups that have ended by now, as `next_ended`."""
        return [self.next_ended() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """End what is in flight. May be repeated."""
        if not self._loop.is_closed():
            self._do(self._stop([*self._tasks]))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, device: int | None) -> None:
        if device is not None:  # each thread has a current one of its own
            torch.cuda.set_device(device)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

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
        await asyncio.gather(*tasks, return_exceptions=True)

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
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            found = error
        del self._tasks[group]
        self._ended.put((group, found))

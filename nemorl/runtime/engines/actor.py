"""The Ray actor around an engine, which has a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.cluster.worker_group import begin_worker
from nemorl.runtime.engines.engine import Engine
from nemorl.runtime.engines.spec import Answer, EngineSpec, Place, Sample
from nemorl.runtime.engines.stage import meet


class EngineActor:
    """One engine in an asynchronous actor: any number of calls at once, in any order.

    All that touches the engine runs on its thread.
    """

    make: Callable[[EngineSpec], Any] = Engine

    def __init__(self, name: str, log: str) -> None:
        begin_worker(name, Path(log))
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiting: dict[int, asyncio.Future[tuple[Sample, ...]]] = {}
        self._ids = itertools.count()
        self._stepping, self._progress, self._partial, self._busy_s = False, 0, 0, 0.0

    async def meet(self, spec: EngineSpec) -> EngineSpec:
        """Return the engine with this process as the one at which its stages meet."""
        return meet(spec)

    async def start(self, spec: EngineSpec) -> Place:
        """Start the engine and return where it is. Raises EngineStartError."""
        self._loop = asyncio.get_running_loop()
        self._engine = await self._loop.run_in_executor(self._thread, self.make, spec)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=tuple(gpus.split(",")) if gpus else (),
            uuids=self._engine.uuids,
        )

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
        """Return the `params.n` samples of a prompt once all are finished.

        `params` have a seed, every token that ends a response, and a length that fits.
        """
        id = next(self._ids)
        self._waiting[id] = self._loop.create_future()
        try:
            self._thread.submit(self._add, id, prompt, params)
            samples = await self._waiting[id]
        except BaseException:
            self._thread.submit(self._do, "abort", id)
            raise
        finally:
            del self._waiting[id]
        return Answer(samples, self._partial, self._busy_s)

    async def progress(self) -> int:
        """Return a number that grows as long as the engine works."""
        return self._progress

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, before its next step, and return the result."""
        return await self._loop.run_in_executor(self._thread, self._do, method, *args)

    def _add(self, id: int, prompt: tuple[int, ...], params: SamplingParams) -> None:
        try:
            self._do("add", id, prompt, params)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._answer, {id: error})

    def _do(self, method: str, *args: Any) -> Any:
        self._progress += 1
        try:
            return getattr(self._engine, method)(*args)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Have the next step done after all calls that wait."""
        if self._engine.busy and not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        self._stepping = False
        if not self._engine.busy:  # a call has ended the work
            return
        begin = time.perf_counter()
        try:
            answers: dict[int, Any] = self._engine.step()
            self._progress += 1
        except Exception as error:
            with suppress(Exception):  # the engine may be broken
                self._engine.abort_all()
            answers = dict.fromkeys(list(self._waiting), error)
        self._partial = self._engine.partial
        self._busy_s += time.perf_counter() - begin
        self._loop.call_soon_threadsafe(self._answer, answers)
        self._go_on()

    def _answer(self, answers: Mapping[int, Any]) -> None:
        """Settle prompts with their samples or an error, on the event loop."""
        for id, answer in answers.items():
            future = self._waiting.get(id)
            if future is None or future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

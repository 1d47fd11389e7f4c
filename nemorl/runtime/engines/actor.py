"""Ray actors around an engine, which has a thread of its own, and around its later stages."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines.engine import (
    Engine,
    engine_arguments,
    model_folder,
    own_folder,
    start_errors,
)
from nemorl.runtime.engines.spec import Answer, EngineSpec, Place, Sample
from nemorl.runtime.workers.worker import begin_worker, free_port


class EngineActor:
    """One engine in an asynchronous actor. All that touches the engine runs on its thread."""

    make: Callable[[EngineSpec], Any] = Engine

    def __init__(self, name: str, log: str) -> None:
        begin_worker(name, Path(log))
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiting: dict[int, asyncio.Future[tuple[Sample, ...]]] = {}
        self._ids = itertools.count()
        self._stepping, self._progress, self._partial, self._busy_s = False, 0, 0, 0.0

    async def meet(self, spec: EngineSpec) -> EngineSpec:
        return replace(spec, meeting=(own_address(), free_port()))

    async def start(self, spec: EngineSpec) -> Place:
        """Raises EngineStartError."""
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
        """`params` have a seed, every token that ends a response, and a length that fits."""
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
        """Before its next step."""
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
        """On the event loop."""
        for id, answer in answers.items():
            future = self._waiting.get(id)
            if future is None or future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def own_address() -> str:
    """Return this node's address in Ray, and have vLLM's processes here use it, too."""
    address = os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    return address


class StageWorkers:
    """The workers of one stage, by vLLM's executor for further nodes. Raises EngineStartError."""

    def __init__(self, spec: EngineSpec) -> None:
        own_address()
        self._own = ExitStack()
        self._own.enter_context(own_folder())
        with start_errors(self._own), model_folder(spec) as folder:
            arguments, _ = engine_arguments(spec, folder)
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = arguments.create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Return when a worker has ended; the others are ended then."""
        self._executor.start_worker_monitor(inline=True)


class StageActor:
    make = StageWorkers

    def __init__(self, name: str, log: str) -> None:
        begin_worker(name, Path(log))
        self._thread = ThreadPoolExecutor(1, "stage")

    async def run(self, spec: EngineSpec) -> None:
        """Return when a worker has ended. Raises EngineStartError."""
        loop = asyncio.get_running_loop()
        stage = await loop.run_in_executor(self._thread, self.make, spec)
        await loop.run_in_executor(self._thread, stage.wait)

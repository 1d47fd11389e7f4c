"""The Ray actor around an engine, whose steps run on a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines.engine import Engine
from nemorl.runtime.engines.spec import Answer, EngineSpec, Place, Sample
from nemorl.runtime.engines.weights import SharedMemory

Job = tuple[Callable[[Engine], Any], "asyncio.Future[Any]"]


class EngineActor:
    """One engine in an asynchronous actor: any number of calls at once, in any order.

    All that touches the engine runs on its thread, between two steps.
    """

    make: Callable[[EngineSpec], Any] = Engine

    def __init__(self, log: str, title: str) -> None:
        redirect_output(Path(log))
        print(f"--- {title}: process {os.getpid()} on {socket.gethostname()}", flush=True)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: dict[int, asyncio.Future[tuple[Sample, ...]]] = {}
        self._ids = itertools.count()
        self._progress, self._partial, self._busy_s = 0, 0, 0.0
        self._relay: SharedMemory | None = None

    async def start(self, spec: EngineSpec) -> Place:
        """Start the engine and return where it is. Raises EngineStartError."""
        self._loop = asyncio.get_running_loop()
        started = self._loop.create_future()
        thread = threading.Thread(target=self._run, args=(spec, started), name="engine")
        thread.daemon = True
        thread.start()
        await started
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=tuple(gpus.split(",")) if gpus else (),
        )

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
        """Return the `params.n` samples of a prompt once all are finished.

        `params` have a seed, every token that ends a response, and a length that fits.
        """
        id = next(self._ids)
        self._waiting[id] = self._loop.create_future()
        try:
            await self.do(lambda engine: engine.add(id, prompt, params))
            samples = await self._waiting[id]
        except BaseException:
            self._jobs.put((lambda engine: engine.abort(id), self._loop.create_future()))
            raise
        finally:
            del self._waiting[id]
        return Answer(samples, self._partial, self._busy_s)

    async def progress(self) -> int:
        """Return a number that grows as long as the engine works."""
        return self._progress

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        await self.do(lambda engine: engine.connect(info))

    async def start_weight_update(self) -> None:
        await self.do(lambda engine: engine.begin_weights())

    async def update_weights(self, info: dict[str, Any], data: Any = None) -> None:
        """Load a part of the weights; `data` are a bucket's bytes from Ray's object store."""
        if data is not None:
            self._relay = self._relay or SharedMemory()
            self._relay.reserve(len(data))
            self._relay.write(data)
            info = {**info, **self._relay.address()}
        await self.do(lambda engine: engine.load_weights(info))

    async def finish_weight_update(self) -> None:
        await self.do(lambda engine: engine.finish_weights())

    async def sleep(self) -> None:
        await self.do(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self.do(lambda engine: engine.wake())

    async def shutdown(self) -> None:
        await self.do(lambda engine: engine.shutdown())

    async def do(self, function: Callable[[Engine], Any]) -> Any:
        """Call the function with the engine, between two steps, and return its result."""
        done = self._loop.create_future()
        self._jobs.put((function, done))
        return await done

    def _run(self, spec: EngineSpec, started: asyncio.Future[None]) -> None:
        try:
            engine = self.make(spec)
        except BaseException as error:
            self._answer(started, error=error)
            return
        self._answer(started)
        while True:
            while not engine.busy or not self._jobs.empty():
                function, done = self._jobs.get()
                try:
                    self._answer(done, function(engine))
                except Exception as error:
                    self._answer(done, error=error)
                self._progress += 1
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        begin = time.perf_counter()
        try:
            finished = engine.step()
        except Exception as error:
            with suppress(Exception):  # the engine may be broken
                engine.abort_all()
            for future in list(self._waiting.values()):
                self._answer(future, error=error)
            return
        self._progress += 1
        self._partial = engine.partial
        self._busy_s += time.perf_counter() - begin
        for id, samples in finished.items():
            if waiting := self._waiting.get(id):
                self._answer(waiting, samples)

    def _answer(
        self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None
    ) -> None:
        """Settle a future of the event loop from the engine's thread."""

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(settle)


def redirect_output(log: Path) -> None:
    """Write all output of this process and its children to the log, that of C++ too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

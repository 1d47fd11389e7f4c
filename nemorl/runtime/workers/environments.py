"""Environments' objects in processes of Ray, for code that blocks, hangs or crashes."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from nemorl.checks import require
from nemorl.rollout.calls import Call, OneThread, call_in_turn
from nemorl.rollout.conversation import ConversationFailed
from nemorl.runtime.config.yaml_io import without_secrets
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout
from nemorl.runtime.workers.cluster import (
    TOO_LITTLE,
    Bundle,
    ResourcesError,
    check,
    connect,
    could_fit,
    is_local,
    release,
    table,
)
from nemorl.runtime.workers.worker import Worker, host

PACKAGE = Path(__file__).parents[2]
DEFAULTS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Ray's options of a worker, before those of rollout.worker."""
START_S = 600.0
RAY = OneThread("nemorl-ray")
"""It lasts, as Ray's processes end with the thread that starts them."""


class Turns:
    """At most `count` blocks run at a time, `async with turns:`, on event loops of any threads."""

    def __init__(self, count: int) -> None:
        self._free, self._waiting = count, deque[Future[None]]()
        self._lock = threading.RLock()  # a task may be collected, and so end, within it

    async def __aenter__(self) -> None:
        turn = Future[None]()
        self._waiting.append(turn)
        self._serve(0)
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            if not turn.cancel():  # it has just got a place
                self._serve(1)
            raise

    async def __aexit__(self, *exception: object) -> None:
        self._serve(1)

    def _serve(self, more: int) -> None:
        """Give free places, and `more`, to those that wait."""
        with self._lock:
            self._free += more
            while self._free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    turn.set_result(None)


class RayWorkers:
    """At most `count` processes, each of which holds the object of one conversation at a time.

    They are used again, by any thread's event loops. One whose call was given up is killed, and
    only its own conversation fails.
    options: of Ray's actors. Raises ValueError for others.
    """

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        try:
            self._actor = ray.remote(host()).options(**{**DEFAULTS, **options})
        except ValueError as error:
            require(
                False,
                "rollout.worker",
                f"must be options of a Ray actor ({error})",
                without_secrets(options),
                "see ray.remote",
            )
        self._count, self._options, self._free = count, options, list[Worker]()
        self._turns, self._connected = Turns(count), False
        self._refused: ResourcesError | None = None

    @asynccontextmanager
    async def room(self, make: Callable[..., Any], kind: type) -> AsyncIterator[Callable[..., Any]]:
        """Wait for a process; yield `async def made(*args, **named)`, which makes a `kind` there.
        Raises RayClusterError, and ResourcesError where processes don't fit.
        """
        async with self._turns:
            if not self._connected:
                await call_in_turn(Call("Ray"), self._connect, RAY)
            if self._refused is not None:
                raise self._refused
            process = _Process(self._worker())
            try:
                await self._started(process)
                yield partial(_made, process, _sent(make, kind), kind)
            finally:
                if process.busy:
                    process.worker.kill()
                else:
                    self._free.append(process.worker)

    def _connect(self) -> None:
        if self._connected:
            return
        connect()
        atexit.register(release)  # no garbage collection may wait for Ray
        if is_local() and not could_fit(self._bundles()):
            self._refused = self._refusal(TOO_LITTLE)
        self._connected = True

    def _worker(self) -> Worker:
        try:
            return self._free.pop()
        except IndexError:  # another thread may take the last one at any time
            return Worker(self._actor.remote(), "the process of this environment")

    async def _started(self, process: _Process) -> None:
        worker, call = process.worker, Call("a process of rollout.workers")
        where = partial(worker.actor.run.remote, lambda: (socket.gethostname(), os.getpid()))
        try:
            async with call.limited():
                call.part()
                worker.host, worker.pid = await process.answer(where, START_S)
        except WorkerTimeout:
            check()
            self._refused = self._refusal(f"a process was not up within {START_S:g} s")
            raise self._refused from None

    def _bundles(self) -> list[Bundle]:
        asked = {**DEFAULTS, **self._options}
        cpus, gpus = asked["num_cpus"] or 0, asked.get("num_gpus") or 0
        resources = asked.get("resources") or {}
        if not any((cpus, gpus, *resources.values())):
            return []
        return [Bundle(cpus=cpus, gpus=gpus, resources=resources)] * self._count

    def _refusal(self, reason: str) -> ResourcesError:
        options = without_secrets(self._options)
        given = f"rollout.workers is {self._count} and rollout.worker {options}"
        return ResourcesError(f"{given}: {table({'worker': self._bundles()}, reason)}")


class _Process:
    def __init__(self, worker: Worker) -> None:
        self.worker, self.busy = worker, False
        """busy: a call has not returned, or it died."""
        self.environment: Any = None
        self._end = ""

    async def answer(self, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        with self._usable():
            return await self.worker.answer(call(), timeout_s=timeout_s)

    def attribute(self, name: str) -> Any:
        with self._usable(), self.worker.failures():
            return ray.get(self.worker.actor.attribute.remote(name))

    @contextmanager
    def _usable(self) -> Iterator[None]:
        if self.busy:
            raise self._failure()
        self.busy = True
        try:
            yield
        except WorkerDied as error:
            self._end = str(error)
            raise self._failure() from None
        except Exception as error:
            self.busy = isinstance(error, WorkerTimeout)
            raise
        self.busy = False

    def _failure(self) -> ConversationFailed:
        failed = ConversationFailed(self._end or f"{self.worker} is lost")
        failed.environment = self.environment
        return failed


async def _made(process: _Process, make: bytes, kind: type, *args: Any, **named: Any) -> Any:
    await process.answer(partial(process.worker.actor.make.remote, make, args, named))
    return _class_of(kind)(process)


def _class_of(kind: type) -> type:
    """Return a class that calls the methods of `kind` in a process."""

    def remote(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.signature(method)
        fixed = isinstance(inspect.getattr_static(kind, name), staticmethod)
        own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] * fixed

        @wraps(method)
        async def call(self: Any, *args: Any, **named: Any) -> Any:
            if name == "close" and self._process.busy:
                return None  # it ends with its process
            start = self._process.worker.actor.call.remote
            return await self._process.answer(partial(start, name, *args, **named))

        vars(call)["__signature__"] = plain.replace(parameters=[*own, *plain.parameters.values()])
        return call

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("_") or name == "close":  # which the class does not have
            raise AttributeError(name)
        return self._process.attribute(name)

    def __init__(self: Any, process: _Process) -> None:
        self._process = process
        process.environment = self

    methods = inspect.getmembers(kind, inspect.isfunction)
    public = {name: remote(name, each) for name, each in methods if not name.startswith("_")}
    return type(kind.__name__, (), {**public, "__init__": __init__, "__getattr__": attribute})


def _sent(make: Callable[..., Any], kind: type) -> bytes:
    """Pickle a class or factory, by value if it is the user's."""
    own = {sys.modules.get(getattr(each, "__module__", "")) for each in (make, kind)}
    mine = [each for each in own if _is_own(each)]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(make)
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: Any) -> bool:
    file = Path(getattr(module, "__file__", None) or "/site-packages/")
    return "site-packages" not in file.parts and PACKAGE not in file.parents

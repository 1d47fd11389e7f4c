"""Objects of environments in processes of a Ray cluster, for code that blocks, hangs or crashes."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from nemorl.checks import require
from nemorl.rollout.conversation import ConversationFailed
from nemorl.runtime.config.yaml_io import without_secrets
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

PACKAGE = Path(__file__).parents[2]
DEFAULTS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Ray's options of a worker; rollout.worker adds to them."""
START_S = 600.0
"""Longest start of a worker."""
DIED = (RayActorError, OutOfMemoryError)


class Places:
    """At most `count` blocks run at a time, `async with places:`, whichever threads' event loops
    they are on; the others wait in turn.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.RLock()  # a task may be collected, and so end, within it
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = loop.create_future()
            self._waiting[turn] = loop
        try:
            await turn
        except BaseException:
            with self._lock:
                given = self._waiting.pop(turn, None) is None
            if given:
                self._leave()
            raise

    async def __aexit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Give the place to the first that waits: it has it once it is no longer in the list."""
        with self._lock:
            while self._waiting:
                turn = next(iter(self._waiting))
                loop = self._waiting.pop(turn)
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(_set, turn)
                    return
            self._free += 1


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class RayWorkers:
    """At most `count` processes, each of which holds the object of one conversation at a time.

    They are used again, by event loops of any thread. One whose call was given up, at its time
    limit or by cancellation, is killed, and only its own conversation fails.
    options: of the actors, by Ray's names. Raises ValueError for others.
    """

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        try:
            self._actor = ray.remote(_host()).options(**{**DEFAULTS, **options})
        except ValueError as error:
            must = f"must be options of a Ray actor ({error})"
            require(False, "rollout.worker", must, without_secrets(options), "see ray.remote")
        self._count, self._options, self._free = count, options, list[Any]()
        self._places, self._connecting = Places(count), threading.Lock()
        self._connected = False
        self._refused: ResourcesError | None = None

    @asynccontextmanager
    async def room(self, make: Callable[..., Any], kind: type) -> AsyncIterator[Callable[..., Any]]:
        """Wait for a process; yield `async def made(*args, **named)`, which makes a `kind` there.

        Raises RayClusterError, and ResourcesError where the processes don't fit.
        """
        self._connect()
        async with self._places:
            if self._refused is not None:
                raise self._refused
            process = _Process(self._worker())
            try:
                await self._started(process)
                yield partial(_made, process, _sent(make, kind), kind)
            finally:
                if process.busy:
                    with suppress(RayError):
                        ray.kill(process.actor)
                else:
                    self._free.append(process.actor)

    def _connect(self) -> None:
        with self._connecting:
            if self._connected:
                return
            connect()
            atexit.register(release)  # no garbage collection may wait for Ray
            self._connected = True
            if is_local() and not could_fit(self._bundles()):
                self._refused = self._refusal(TOO_LITTLE)

    def _worker(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:  # another thread may take the last one at any time
            return self._actor.remote()

    async def _started(self, process: "_Process") -> None:
        try:
            async with asyncio.timeout(START_S):
                await process.ask("ready")
        except TimeoutError:
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
    def __init__(self, actor: Any) -> None:
        self.actor, self.busy = actor, False
        """busy: whether a call has not returned; it can't be used then, or after its death."""
        self.environment: Any = None
        self._end = "is lost"

    async def ask(self, method: str, *args: Any) -> Any:
        if self.busy:
            raise self.failure()
        self.busy = True
        try:
            found = await getattr(self.actor, method).remote(*args)
        except RayTaskError as error:
            self.busy = False
            raise error.cause from None
        except DIED as error:
            raise self.failure(error) from None
        self.busy = False
        return found

    def attribute(self, name: str) -> Any:
        if self.busy:
            raise self.failure()
        try:
            return ray.get(self.actor.attribute.remote(name))
        except RayTaskError as error:
            raise error.cause from None
        except DIED as error:
            raise self.failure(error) from None

    def failure(self, error: Exception | None = None) -> ConversationFailed:
        """error: what ended the process just now."""
        self.busy = True
        if error is not None:
            self._end = f"ended: {error}"
        failed = ConversationFailed(f"the process of this environment {self._end}")
        failed.environment = self.environment
        return failed


async def _made(process: _Process, make: bytes, kind: type, *args: Any, **named: Any) -> Any:
    await process.ask("make", make, args, named)
    return _class_of(kind)(process)


def _class_of(kind: type) -> type:
    """Return a class with the methods of `kind`, which are called in a process."""

    def remote(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.signature(method)
        fixed = isinstance(inspect.getattr_static(kind, name), staticmethod)
        own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] * fixed

        @wraps(method)
        async def call(self: Any, *args: Any, **named: Any) -> Any:
            if name == "close" and self._process.busy:
                return None  # it ends with its process
            return await self._process.ask("call", name, args, named)

        said = plain.replace(parameters=[*own, *plain.parameters.values()])
        vars(call)["__signature__"] = said
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
    """Pickle a class or factory, by value where it is the user's own file."""
    own = {sys.modules.get(getattr(each, "__module__", "")) for each in (make, kind)}
    mine = [each for each in own if each is not None and _is_own(each)]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(make)
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType) -> bool:
    file = Path(getattr(module, "__file__", None) or "/site-packages/")
    return "site-packages" not in file.parts and PACKAGE not in file.parents


def _host() -> type:
    """Return the class of the actors, which needs nothing of ours in their processes."""

    class EnvironmentWorker:
        def ready(self) -> None:
            pass

        def make(self, make: bytes, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            import pickle

            self.environment = pickle.loads(make)(*args, **named)

        def call(self, method: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            import asyncio
            import inspect

            found = getattr(self.environment, method)(*args, **named)
            if not inspect.isawaitable(found):
                return found
            if not hasattr(self, "runner"):
                self.runner = asyncio.Runner()

            async def awaited() -> Any:
                return await found

            return self.runner.run(awaited())

        def attribute(self, name: str) -> Any:
            return getattr(self.environment, name)

    return EnvironmentWorker

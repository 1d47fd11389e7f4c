"""Objects of environments in processes of a Ray cluster, for code that blocks, hangs or crashes."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemorl.checks import require
from nemorl.rollout.conversation import ConversationFailed
from nemorl.runtime.cluster.connection import connect, release

PACKAGE = Path(__file__).parents[2]
DEFAULTS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Ray's options of a worker; rollout.worker adds to them."""


class RayWorkers:
    """At most `count` processes, each of which holds the object of one conversation at a time.

    They start when they are needed, and are used again. One whose call was given up, at its time
    limit or by cancellation, is killed, and only its own conversation fails.
    options: of the actors, by Ray's names. Raises: ValueError for others; RayClusterError from
    `room` where Ray can't be reached.
    """

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        try:
            self._actor = ray.remote(_host()).options(**{**DEFAULTS, **options})
        except ValueError as error:
            must = f"must be options of a Ray actor ({error})"
            require(False, "rollout.worker", must, options, "see ray.remote")
        self._count, self._free = count, list[Any]()
        self._connected = False
        self._rooms = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    @asynccontextmanager
    async def room(self, make: Callable[..., Any], kind: type) -> AsyncIterator[Callable[..., Any]]:
        """Wait for a process, and yield `async def made(*args, **named)`, which makes an object of
        the class `kind` there.
        """
        if not self._connected:
            connect()
            atexit.register(release)  # no garbage collection may wait for Ray
            self._connected = True
        loop = asyncio.get_running_loop()
        async with self._rooms.setdefault(loop, asyncio.Semaphore(self._count)):
            process = _Process(self._free.pop() if self._free else self._actor.remote())
            try:
                await process.ask("ready")
                yield partial(_made, process, _sent(make, kind), kind)
            finally:
                if process.busy:
                    with suppress(RayError):
                        ray.kill(process.actor)
                else:
                    self._free.append(process.actor)


class _Process:
    """A worker as a conversation sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.busy = actor, False
        """busy: whether a call has not returned; it can't be used then, or after its death."""

    async def ask(self, method: str, *args: Any) -> Any:
        if self.busy:
            raise ConversationFailed("the process of this environment is lost")
        self.busy = True
        try:
            found = await getattr(self.actor, method).remote(*args)
        except RayTaskError as error:
            self.busy = False
            raise error.cause from None
        except RayActorError as error:
            reason = f"the process of this environment ended: {error}"
            raise ConversationFailed(reason) from None
        self.busy = False
        return found


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
        if name.startswith("_") or self._process.busy:
            raise AttributeError(name)
        try:
            return ray.get(self._process.actor.attribute.remote(name))
        except RayTaskError as error:
            raise error.cause from None

    def __init__(self: Any, process: _Process) -> None:
        self._process = process

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

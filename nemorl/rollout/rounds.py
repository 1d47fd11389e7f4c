"""Blocking code and coroutines together: an `EventLoop` of one's own, and `Rounds`."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from nemorl.rollout.conversation import EnvironmentTimeout
from nemorl.rollout.signature import name_of

T = TypeVar("T")


class EventLoop:
    """An event loop that runs one coroutine after the other to its end, and nothing in between;
    where the thread has one that runs, as in a notebook, in another thread.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._lock = threading.Lock()
        self._inside: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> "EventLoop":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises RuntimeError where a coroutine of its own calls it."""
        if _has_loop() and asyncio.get_running_loop() is self._inside:
            work.close()
            raise RuntimeError(
                "an async reward must not call the environment that it belongs to: await the"
                " function instead"
            )
        with self._lock:
            self._inside = self._runner.get_loop()
            if not _has_loop():
                return self._runner.run(work)
            loop = self._runner.get_loop()
            task = loop.create_task(work)
            with ThreadPoolExecutor(1) as pool:
                try:
                    return pool.submit(loop.run_until_complete, task).result()
                except BaseException:
                    loop.call_soon_threadsafe(task.cancel)
                    raise

    def free(self) -> None:
        """Close the loop as garbage collection must: without thread or lock, which may be held."""
        if self._inside is not None:
            self._inside.close()

    def close(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._runner.close).result() if _has_loop() else self._runner.close()


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; where this thread has an event loop, in a thread of its own."""
    with EventLoop() as loop:
        return loop.run(work)


THREADS = 64
"""Blocking calls at a time."""


Request = tuple[Any, asyncio.Future]
Place = tuple[int, int]
"""Numbers of a coroutine and of its `Rounds`."""
Asked = dict[Any, dict[Place, Request]]
"""By function and coroutine."""
_PLACE: ContextVar[Place] = ContextVar("_PLACE", default=(0, 0))


class _Shared:
    """What `Rounds` on one event loop have in common."""

    def __init__(self) -> None:
        self.soon: Asked = {}
        self.calling: dict[Any, asyncio.Task[None]] = {}
        self.late: dict[Any, EnvironmentTimeout] = {}
        """By function, which is not called again: its last call may still go on."""
        self.free = asyncio.Semaphore(THREADS)
        self.together: dict[Any, list[tuple[Callable, list[Request]]]] = {}
        self.judging: dict[Any, asyncio.Task[None]] = {}


class Rounds:
    """Coroutines side by side, which ask functions for answers.

    - `together`: a function of a batch is called once all coroutines that are left wait for one, in
      the caller's thread, outside the event loop, so that it may block or run a loop itself.
    - `at_once`: a function of a batch is called with what it has been asked since its last call.
    - `in_thread`: a function is called in a thread, by a caller that holds `free`.

    Several may share an event loop (`led`), each a group of coroutines which `together` waits for
    alone. Calls for an owner come one after the other, one for each group.
    """

    def __init__(self, *, beside: "Rounds | None" = None, number: int = 0) -> None:
        self.number = number
        self._asked: Asked = {}
        self._owners: dict[Callable, Any] = {}
        self._shared: _Shared = _Shared() if beside is None else beside._shared
        self._open = self._waiting = self._outside = 0
        self._error: BaseException | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self.over = False

    async def together(
        self,
        function: Callable[[Sequence[Any]], Sequence[T | Exception]],
        item: Any,
        *,
        owner: Any = None,
    ) -> T:
        """Return what will be `function(items)` for this item, or raise it if it is an error. One
        whose `owner` has `each_alone` may be asked for several groups in a call.
        """
        self._owners[function] = owner
        future = self._future(self._asked, function, item)
        self._waiting += 1
        self._compare()
        return _result(await future)

    @asynccontextmanager
    async def room(self, room: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Enter a context; `together` does not wait for coroutines that are still outside."""
        async with AsyncExitStack() as stack:
            self._outside += 1
            self._compare()
            try:
                found = await stack.enter_async_context(room)
            finally:
                self._outside -= 1
            yield found

    async def at_once(
        self,
        function: Callable[[Sequence[Any]], Sequence[T | Exception]],
        item: Any,
        call: Callable[..., Awaitable[Any]],
        *,
        owner: Any = None,
    ) -> T:
        """Return what will be `function(items)` for this item, or raise it if it is an error."""
        key, shared = function if owner is None else id(owner), self._shared
        if key in shared.late:
            raise shared.late[key]
        future = self._future(shared.soon, key, item)
        if key not in shared.calling:
            shared.calling[key] = asyncio.create_task(self._call(function, key, call))
        return _result(await future)

    def _future(self, asked: Asked, key: Any, item: Any) -> asyncio.Future:
        if self._error is not None:
            raise self._error
        future = asyncio.get_running_loop().create_future()
        asked.setdefault(key, {})[_PLACE.get()] = (item, future)
        return future

    @property
    def free(self) -> asyncio.Semaphore:
        return self._shared.free

    def renew(self) -> None:
        self._shared.late.clear()

    async def in_thread(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        loop, call = asyncio.get_running_loop(), partial(function, *args, **named)
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            give: Callable[[Any], None]
            answer: Any
            try:
                give, answer = future.set_result, call()
            except StopIteration as error:  # which no future takes
                give, answer = future.set_exception, RuntimeError("it raised StopIteration")
                answer.__cause__ = error
            except BaseException as error:
                give, answer = future.set_exception, error
            with suppress(RuntimeError):  # the loop may be over
                loop.call_soon_threadsafe(_if_open, future, give, answer)

        # A daemon's: one that never returns must not keep the program from ending.
        threading.Thread(target=work, name="nemorl-environment", daemon=True).start()
        return await future

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._idle.set()

    def run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return what the coroutines return. Raises what one raises, or `fail` is given."""
        self._open = len(work)
        with EventLoop() as loop:
            try:
                tasks = loop.run(self._begin(work))
                while self._open:
                    self._answer()
                    loop.run(self._all_wait())
                return [task.result() for task in tasks]
            finally:
                self.over = True

    async def led(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return what the coroutines return, on the event loop that runs: functions that are asked
        `together` are called in a thread.
        """
        self._open = len(work)
        try:
            tasks = await self._begin(work)
            while self._open:
                for function, requests in self._taken():
                    self._judge(function, requests)
                await self._all_wait()
            return [task.result() for task in tasks]
        finally:
            self.over = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _judge(self, function: Callable, requests: list[Request]) -> None:
        owner, shared = self._owners[function], self._shared
        key = function if owner is None else id(owner)
        shared.together.setdefault(key, []).append((function, requests))
        if key not in shared.judging:
            shared.judging[key] = asyncio.create_task(self._judged(owner, key))

    async def _judged(self, owner: Any, key: Any) -> None:
        shared = self._shared
        try:
            while waiting := shared.together.pop(key, []):
                if getattr(owner, "each_alone", False):  # groups in one call judge no other
                    waiting = [(waiting[0][0], [one for _, each in waiting for one in each])]
                for function, requests in waiting:
                    await self._one_call(function, requests, owner)
        finally:
            del shared.judging[key]

    async def _one_call(self, function: Callable, requests: list[Request], owner: Any) -> None:
        requests = [request for request in requests if not request[1].done()]
        items = [item for item, _ in requests]
        try:
            _give(requests, await self.in_thread(_locked, owner, function, items))
        except Exception as error:
            _give(requests, [error] * len(requests))
        except BaseException as error:
            ended = RuntimeError(f"a reward or environment raised {error!r}")
            ended.__cause__ = error
            _give(requests, [ended] * len(requests))
            raise

    def begun(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)

    def _answer(self) -> None:
        for function, requests in self._taken():
            items = [item for item, _ in requests]
            _give(requests, _locked(self._owners[function], function, items))

    def _taken(self) -> list[tuple[Callable, list[Request]]]:
        asked, self._asked, self._waiting = self._asked, {}, 0
        return [(function, _in_order(each)) for function, each in asked.items()]

    async def _call(
        self, function: Callable, key: Any, call: Callable[..., Awaitable[Any]]
    ) -> None:
        shared = self._shared
        try:
            while asked := shared.soon.pop(key, {}):
                requests = _in_order(asked)
                try:
                    _give(requests, await call(function, [item for item, _ in requests]))
                except EnvironmentTimeout as error:
                    shared.late[key] = error
                    requests += _in_order(shared.soon.pop(key, {}))
                    _give(requests, [error] * len(requests))
                except BaseException as error:
                    _give(requests, [error] * len(requests))
                    if not isinstance(error, Exception):
                        raise
        finally:
            del shared.calling[key]

    async def _begin(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[asyncio.Task[T]]:
        self._idle = asyncio.Event()
        tasks = [asyncio.create_task(self._counted(*each)) for each in enumerate(work)]
        self._tasks = [*tasks]
        await self._all_wait()
        return tasks

    async def _counted(self, place: int, work: Coroutine[Any, Any, T]) -> T:
        _PLACE.set((self.number, place))
        try:
            return await work
        finally:
            self._open -= 1
            self._compare()

    async def _all_wait(self) -> None:
        self._idle.clear()
        self._compare()
        await self._idle.wait()
        if self._error is not None:
            raise self._error

    def _compare(self) -> None:
        """End `_all_wait` once all that are open have asked, or are outside of a room."""
        outside = self._outside if self._waiting else 0
        if self._waiting + outside >= self._open:
            self._idle.set()


_LOCKS: dict[int, threading.RLock] = {}
"""By the owner's id."""


def _locked(owner: Any, function: Callable[[list[Any]], T], items: list[Any]) -> T:
    with _LOCKS.setdefault(id(owner), threading.RLock()):
        return function(items)


def _in_order(asked: Mapping[Place, Request]) -> list[Request]:
    """Return requests in the order of the coroutines, whoever came first."""
    return [asked[place] for place in sorted(asked)]


def _if_open(future: asyncio.Future, give: Callable[[Any], None], answer: Any) -> None:
    if not future.done():  # its coroutine may have given up
        give(answer)


def _give(requests: Sequence[Request], answers: Sequence[Any]) -> None:
    for (_, future), answer in zip(requests, answers, strict=True):
        _if_open(future, future.set_result, answer)


def _result(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def caller(rounds: Rounds, name: str, seconds: float) -> Callable[..., Awaitable[Any]]:
    """Return `async def call(function, *args, **named)`: an `async` function is called on the event
    loop, any other in a thread; EnvironmentTimeout after `seconds` without the wait for a thread.
    """

    async def call(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        given, direct = partial(function, *args, **named), inspect.iscoroutinefunction(function)
        try:
            async with asyncio.timeout(seconds if direct else None) as limit:
                if direct:
                    return await given()
                async with rounds.free:
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    found = await rounds.in_thread(given)
                return await found if inspect.isawaitable(found) else found
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                raise
            what = f"{name}: {name_of(function)} must end within {seconds:g} s"
            raise EnvironmentTimeout(f"{what} (rollout.timeout_s)") from error

    return call

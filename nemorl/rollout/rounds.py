"""Blocking code and coroutines together: an `EventLoop` of one's own, and `Rounds`."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """An event loop that runs one coroutine after the other to its end, and nothing in between.

    Where the calling thread has a loop that runs, as in a notebook, it runs in another thread.
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
        """Return what a coroutine returns. Raises RuntimeError where one of its own calls this."""
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

    def close(self) -> None:
        """Cancel what the loop has left. May be repeated."""
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


PATIENCE_S = 0.05
"""How long a round waits for coroutines that wait for something else."""


class Rounds:
    """Coroutines that ask functions of a batch for one answer each.

    Once all of them wait for one, each function is called once, with everything that it was asked.
    Where some wait for something else, such as a tool or each other, it is called after PATIENCE_S
    with what it was asked by then. It is called in the caller's thread, outside the event loop, so
    it may block or run a loop itself.
    """

    def __init__(self) -> None:
        self._asked: dict[Callable, list[tuple[Any, asyncio.Future]]] = {}
        self._open = self._waiting = 0
        self._error: BaseException | None = None
        """What a function raised, which ends all."""
        self.over = False
        """Whether the coroutines that are left are being cancelled."""

    def ask(self, function: Callable[[Sequence[Any]], Sequence[T]], item: Any) -> Awaitable[T]:
        """Return what will be `function(items)` for this item of the round."""
        if self._error is not None:
            raise self._error
        future = asyncio.get_running_loop().create_future()
        self._asked.setdefault(function, []).append((item, future))
        self._waiting += 1
        self._compare()
        return future

    def run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return what the coroutines return. Raises what one of them or a function raises."""
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

    def _answer(self) -> None:
        """Call each function with what it was asked."""
        asked, self._asked, self._waiting = self._asked, {}, 0
        for function, requests in asked.items():
            try:
                answers = function([item for item, _ in requests])
            except BaseException as error:
                self._error = error
                raise
            for (_, future), answer in zip(requests, answers, strict=True):
                if not future.done():  # its coroutine may have given up
                    future.set_result(answer)

    async def _begin(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[asyncio.Task[T]]:
        tasks = [asyncio.create_task(self._counted(each)) for each in work]
        await self._all_wait()
        return tasks

    async def _counted(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            self._open -= 1
            self._compare()

    async def _all_wait(self) -> None:
        """Wait until all coroutines wait for an answer, or some have for long enough."""
        self._idle = asyncio.Event()
        self._compare()
        while not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), PATIENCE_S)
            if self._asked:
                return

    def _compare(self) -> None:
        """End `_all_wait` once as many have asked as are open."""
        if self._waiting >= self._open:
            self._idle.set()

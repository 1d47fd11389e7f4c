"""Calls of the user's functions: by the names of their parameters, in threads and on event loops,
with time limits; an exit or a fork in them is refused.
"""

import asyncio
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

from nemorl.checks import warn
from nemorl.data.rows import own_copy
from nemorl.rollout.conversation import EnvironmentTimeout

T = TypeVar("T")

PROMPT = ("prompt", "prompts")
RESPONSE = ("response", "responses", "completion", "completions", "solution_str")
ENVIRONMENT = ("environment", "environments")
"""Parameters that get the environment of tools itself, not a copy."""
PLURAL = ("prompts", "responses", "completions")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Which parameters of a reward function get what."""

    name: str
    batch: bool
    """It takes and returns lists, one entry per response."""
    prompt: str | None
    response: str | None
    """The parameters that get prompt and response. No response: it judges an environment alone."""
    columns: Mapping[str, bool]
    """The columns that it names; False: the parameter has a default."""
    any_columns: bool
    """It takes `**columns`."""
    settings: Mapping[str, Any]
    """Values that do not come from the data."""
    awaited: bool
    """It is `async`."""

    def arguments(self, prompt: Any, response: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        values = {
            name: value if name in ENVIRONMENT else own_copy(value)
            for name, value in columns.items()
            if name in self.columns or (self.any_columns and name not in (*PROMPT, *RESPONSE))
        } | dict(self.settings)
        if self.response:
            values[self.response] = response
        if self.prompt or self.any_columns:
            values[self.prompt or PROMPT[self.batch]] = prompt
        return values


def read_signature(
    fn: Any,
    *,
    batch: bool | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    there: Collection[str] = (),
) -> Signature:
    """Return the signature of a reward function for rows that have the columns `there`.

    Parameters called `prompt` and `response` (or `completion`, verl's `solution_str`) get those,
    others the setting or else the column of their name. If it names no response, its first
    parameter without a setting or column gets it; if no prompt either, and it has two, these get
    both; none does in a function of an `environment`. Plural names or batch=True make it a function
    of a batch.
    Raises: ValueError for what is not a function or can't take a response.

    >>> read_signature(lambda prompts, responses, answer: [0.0]).batch
    True
    """
    if not callable(fn):
        raise ValueError(
            f"reward must be a function fn(prompt, response), but it is {fn!r}: pass the function"
            " itself"
        )
    name = name or name_of(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {name!r} must show its parameters, but {fn!r} has none: wrap it, lambda"
            " prompt, response: ..."
        ) from error
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            shown = f"*{p.name}" if p.kind == p.VAR_POSITIONAL else f"{p.name}, /"
            raise ValueError(
                f"reward {name!r} must take its parameters by name, but it has ({shown}): remove"
                " the * or /; a decorator needs functools.wraps"
            )
    by_place = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    prompt = next((n for n in PROMPT if n in named), None)
    response = next((n for n in RESPONSE if n in named), None)
    if response is None and not {*ENVIRONMENT} & {*named}:
        free = [n for n in by_place if n != prompt and n not in {*there, *settings}]
        if prompt is None and (len(free) > 1 or len(free) == len(by_place)):
            prompt, *free = free or [PROMPT[0]]
        if not free:
            columns = [each for each in by_place if each in there]
            hint = f", of which the data has the columns {columns}" if columns else ""
            raise ValueError(
                f"reward {name!r} must take at least (prompt, response), but its parameters are"
                f" {[p.name for p in parameters]}{hint}: add them"
            )
        response = free[0]
    return Signature(
        name=name,
        batch=bool({*PLURAL, "environments"} & set(named)) if batch is None else batch,
        prompt=prompt,
        response=response,
        columns={
            p.name: p.default is p.empty
            for p in parameters
            if p.name in named and p.name not in (prompt, response, *settings)
        },
        any_columns=any(p.kind == p.VAR_KEYWORD for p in parameters),
        settings={key: value for key, value in settings.items() if key in named},
        awaited=is_async(fn),
    )


def is_async(fn: Any) -> bool:
    """Return whether a function or callable object is `async`."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def accepted(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, offered by name, that a function takes; all if it takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a class of C code
        return {}
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def name_of(fn: Any) -> str:
    """Return a reward's name for metrics and errors."""
    inner = getattr(fn, "func", fn)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


class ExitInUserCode(RuntimeError):
    """Code of the user's called sys.exit, or raised GeneratorExit."""


@contextmanager
def exit_is_error(name: str) -> Iterator[None]:
    """Raise ExitInUserCode for a sys.exit or GeneratorExit in the block, unless a signal did it. A
    fork that leaves the block ends (`end_fork`).
    """
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        if type(error) not in (SystemExit, GeneratorExit):  # SIGTERM's Terminated
            raise
        did = "raised GeneratorExit"
        if isinstance(error, SystemExit):
            did = f"called sys.exit({error.code!r})"
        raise ExitInUserCode(
            f"{name} must not end the run, but it {did}: raise an exception instead"
        ) from error
    finally:
        end_fork()


HOLDERS: dict[str, int] = {}
"""The process that holds the lock of a run's folder, by the folder; its forks have them, too."""


def end_fork(place: str = "") -> None:
    """End this process if it is a fork of the one that writes a run, below which a path is."""
    for folder, holder in list(HOLDERS.items()):
        if holder != os.getpid() and f"{place or folder}/".startswith(f"{folder}/"):
            text = (
                f"process {os.getpid()} ends: it is a fork of process {holder}, whose run writes"
                f" {folder}, and came back from a reward, a loss or a callback: end forked children"
                " with os._exit\n"
            )
            os.write(2, text.encode(errors="backslashreplace"))
            os._exit(1)


def forget_error(task: asyncio.Task) -> None:
    """Keep asyncio from logging an interrupt in a task, which its event loop has raised."""
    if not task.cancelled():
        task.exception()


class EventLoop:
    """An event loop in a daemon thread of its own, with its maker's CUDA device."""

    def __init__(
        self, name: str = "nemorl-loop", on_error: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """on_error: gets an exit or interrupt in a task or callback; the loop goes on."""
        self.loop, self._on_error = asyncio.new_event_loop(), on_error
        self._closing, self._turned, self._since = False, True, 0.0
        self.thread = threading.Thread(target=_like_here(self._work), name=name, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result. Raises: RuntimeError in the loop itself."""
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError(
                "an async reward must not call the environment that it belongs to: await the"
                " function instead"
            )
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def blocked(self, seconds: float) -> bool:
        """Return whether a task keeps the loop from turning since this was asked so long ago."""
        if self._turned:
            self._turned, self._since = False, time.monotonic()
            self.loop.call_soon_threadsafe(setattr, self, "_turned", True)
        late = time.monotonic() - self._since >= seconds
        return late and asyncio.current_task(self.loop) is not None

    def close(self) -> None:
        """Cancel what goes on, and end the thread. Does not wait, and may be repeated."""
        if not self._closing:
            self._closing = True
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            try:
                self.loop.run_forever()
            except BaseException as error:  # sys.exit in a task of user code, which ends the loop
                self._on_error(error)
        try:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; where this thread has an event loop, in a thread of its own."""
    if not _has_loop():
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work)
    with closing(EventLoop()) as loop:
        return loop.run(work)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _like_here(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that another thread calls with this one's CUDA device and context."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    device = cuda.current_device() if cuda and cuda.is_initialized() else None
    context = copy_context()

    def call() -> T:
        if device is not None:
            cuda.set_device(device)
        return context.run(function)

    return call


def _in_thread(
    call: "Call", function: Callable[[], T], start: Callable[[Callable[[], None]], None]
) -> asyncio.Future[T]:
    """Return the result of a function in the thread in which `start` calls what it is given."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def begin() -> T:
        _CALL.set(call)
        call.part()
        return function()

    begun = _like_here(begin)

    def work() -> None:
        give: Callable[[Any], None]
        answer: Any
        try:
            give, answer = future.set_result, begun()
        except StopIteration as error:  # which no future takes
            give, answer = future.set_exception, RuntimeError("it raised StopIteration")
            answer.__cause__ = error
        except BaseException as error:
            give, answer = future.set_exception, error
        end_fork()
        with suppress(RuntimeError):  # the loop may be over
            loop.call_soon_threadsafe(_if_open, future, give, answer)

    start(work)
    return future


def _if_open(future: asyncio.Future, give: Callable[[Any], None], answer: Any) -> None:
    if not future.done():  # its coroutine may have given up
        give(answer)


def _new_thread(work: Callable[[], None], name: str = "nemorl-environment") -> None:
    # A daemon's: a call that never returns must not keep the program from ending.
    threading.Thread(target=work, name=name, daemon=True).start()


class OneThread:
    """A thread that makes one call after the other: the next one has what a reward keeps in its
    thread, such as a connection.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._name, self._owner, self._number = name, 0, 0

    def start(self, work: Callable[[], None]) -> None:
        self._calls.put(work)
        if self._owner != os.getpid():  # the first call, or the first in a fork
            self.renew()

    def renew(self) -> None:
        """Make later calls in a new thread, as one does not return."""
        self._owner, self._number = os.getpid(), self._number + 1
        _new_thread(partial(self._work, self._number), self._name)

    def _work(self, number: int) -> None:
        while number == self._number:
            self._calls.get()()


REWARDS = OneThread("nemorl-rewards")
"""Of all event loops."""
SHOWN_S = 5.0
"""Seconds after which a call is shown; then again whenever they have doubled."""


class Call:
    """A call of the user's code, whose parts each have a time limit (`rollout.timeout_s`).

    It is shown while `conversations` wait for it.
    """

    def __init__(self, name: str, seconds: float = math.inf, conversations: int = 1) -> None:
        self.name, self.seconds, self.conversations = name, seconds, conversations
        self._since = self._ends = math.inf
        self._shown = SHOWN_S

    def part(self, name: str = "", *, most: float | None = None) -> None:
        """Start the clock of another part, which may have a name and a limit of its own."""
        now = time.monotonic()
        self.name = name or self.name
        self._since = min(self._since, now)
        self._ends = now + (self.seconds if most is None else most)

    def pause(self) -> None:
        """Stop the clock while the code waits for what is not its own."""
        self._since = self._ends = math.inf

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Show a call that takes long. Raises: EnvironmentTimeout once a part takes too long."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            now = time.monotonic()
            self._show(now)
            if self._ends <= now:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(min(1.0, self.seconds, self._ends - now), look)

        look()
        try:
            async with asyncio.timeout(None) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                raise
            raise EnvironmentTimeout(
                f"{self.name} must end within {self.seconds:g} s (rollout.timeout_s), but did not:"
                " raise the limit, or have it called in processes, which can be ended"
                " (nemorl.judged_in_processes, rollout.workers)"
            ) from error
        finally:
            timer.cancel()

    def _show(self, now: float) -> None:
        if self.conversations and now - self._since >= self._shown:
            who = f"{self.conversations} conversation{'s' * (self.conversations > 1)}"
            limit = f"; rollout.timeout_s is {self.seconds:g}" * math.isfinite(self.seconds)
            warn(f"waiting for {self.name} for {self._shown:g} s ({who}{limit})")
            self._shown *= 2


_CALL: ContextVar[Call] = ContextVar("_CALL")


def present_call() -> Call:
    """Return the call that this thread makes, to say which part it is at."""
    return _CALL.get(None) or Call("")


async def call_limited(
    call: Call, free: asyncio.Semaphore, function: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Return a function's result: an `async` one is called on the event loop, any other in one of
    the threads that `free` allows. Raises: EnvironmentTimeout.
    """
    given = partial(function, *args, **named)
    async with call.limited():
        if is_async(function):
            call.part()
            return await given()
        async with free:
            found = await _in_thread(call, given, _new_thread)
        return await found if inspect.isawaitable(found) else found


async def call_in_turn(call: Call, function: Callable[[], T], thread: OneThread = REWARDS) -> T:
    """Return a function's result, called in a thread. Raises: EnvironmentTimeout."""
    try:
        async with call.limited():
            return await _in_thread(call, function, thread.start)
    except EnvironmentTimeout:
        thread.renew()
        raise


@dataclass(frozen=True, kw_only=True)
class Question:
    """An item of a batch, whose answer is awaited."""

    place: tuple[int, int]
    """Its order in the batch."""
    item: Any
    answer: asyncio.Future[Any]


class BatchCalls:
    """Calls of a function of a batch, one after the other."""

    def __init__(
        self,
        function: Callable[[Sequence[Any]], Sequence[Any]],
        name: str,
        *,
        each_alone: bool = False,
    ) -> None:
        """function: returns an answer, or an exception, for each item.

        each_alone: whether an answer depends on nothing else in the batch.
        """
        self._function, self._name, self.each_alone = function, name, each_alone
        self._waiting: list[list[Question]] = []
        self._task: asyncio.Task[None] | None = None
        self._late: EnvironmentTimeout | None = None
        """No call is made after it, as the last one may go on."""

    def renew(self) -> None:
        self._late = None

    def ask(self, batch: list[Question], seconds: float, *, merged: bool) -> None:
        """Have a batch answered. merged: with all that wait, in one call."""
        self._waiting.append(batch)
        if self._task is None:
            self._task = asyncio.create_task(self._work(seconds, merged))
            self._task.add_done_callback(forget_error)

    async def _work(self, seconds: float, merged: bool) -> None:
        try:
            while self._waiting:
                count = len(self._waiting) if merged else 1
                taken, self._waiting = self._waiting[:count], self._waiting[count:]
                asked = [each for batch in taken for each in batch if not each.answer.done()]
                if asked:
                    await self._answer(sorted(asked, key=lambda each: each.place), seconds)
        finally:
            self._task = None

    async def _answer(self, asked: Sequence[Question], seconds: float) -> None:
        call = Call(self._name, seconds, len(asked))
        function = partial(self._function, [each.item for each in asked])
        found: Sequence[Any]
        try:
            found = [self._late] * len(asked) if self._late else await call_in_turn(call, function)
        except EnvironmentTimeout as error:
            self._late = error
            found = [error] * len(asked)
        except BaseException as error:
            ended = RuntimeError(f"a reward or environment raised {error!r}")
            ended.__cause__ = error
            found = [ended] * len(asked)
            raise
        finally:
            for each, answer in zip(asked, found, strict=True):
                _if_open(each.answer, each.answer.set_result, answer)

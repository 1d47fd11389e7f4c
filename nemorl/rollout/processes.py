"""Calls in processes with a time limit: for rewards that are slow or may never return."""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from math import isnan
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

import cloudpickle
import psutil

from nemorl.checks import as_number, require, short

Function = TypeVar("Function", bound=Callable[..., Any])
LIMIT = "_limit_in_processes"
LOADING_S = 600.0
"""Limit of loading the function and its modules."""
ENDED = "its process ended: it called os._exit, crashed in C, or needed too much memory"
LATE = object()
"""The result of a call that took too long."""
WORKER = """
import sys
sys.path[:] = sys.argv[2:]
from nemorl.rollout.processes import work
work(int(sys.argv[1]))
"""


def judged_in_processes(
    *, seconds: float = 5.0, imports: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Have a reward of one response judged in processes, in parallel, with a time limit for each.

    A response that takes longer than `seconds` gets reward 0, with a warning, and its process is
    killed with what it has started. The function is pickled, and may be one of a script, a notebook
    or a module. `imports`: modules that it imports in calls, whose import takes none of its time.

    >>> @judged_in_processes(seconds=2)
    ... def slow(prompt, response):
    ...     return float(len(response) > 3)
    """
    require(seconds > 0, "seconds", "must be positive", seconds, "5 is usual")

    def with_limit(fn: Function) -> Function:
        setattr(fn, LIMIT, (float(seconds), tuple(imports)))
        return fn

    return with_limit


class Other(str):
    """A result that is no number, as errors show it."""

    __repr__ = str.__str__


class _Worker:
    """A process that calls the function, in a session of its own."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.connection, theirs = Pipe()
        self.ready, self.deadline = False, time.monotonic() + LOADING_S
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # it closes where the run ends
            start_new_session=True,
        )
        theirs.close()
        self.connection.send((cloudpickle.dumps(fn), getattr(fn, LIMIT)[1]))

    def call(self, arguments: Mapping[str, Any], seconds: float) -> None:
        with suppress(OSError):  # it has ended, as `receive` finds
            self.connection.send_bytes(cloudpickle.dumps(arguments))
        self.deadline = time.monotonic() + seconds

    def receive(self) -> tuple[Any, BaseException | None] | None:
        """Return a call's result and error; None: the function is loaded."""
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            self.ready, found = False, (None, RuntimeError(ENDED))
        self.ready |= found is None
        return found

    def kill(self) -> None:
        kill_tree(self.process.pid)
        self.process.communicate()
        self.connection.close()


def kill_tree(pid: int) -> None:
    """Kill the processes of a session, by its first one, and what they have started."""
    left: list[psutil.Process] = []
    with suppress(psutil.Error):
        left = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for child in left:
        with suppress(psutil.Error):
            child.kill()


class Processes:
    """Calls one function in other processes, from any thread; they end with this object."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.seconds = fn, getattr(fn, LIMIT)[0]
        self._most = len(os.sched_getaffinity(0))
        self._idle: list[_Worker] = []
        weakref.finalize(self, _end, self._idle, os.getpid())

    def run(self, calls: Sequence[Mapping[str, Any]]) -> Generator[Callable[[], Any]]:
        """Yield a function for each call, in order, once it is done: it returns a number or a list
        of them, an `Other` or LATE, or raises the call's error. Calls that go on end with the
        iterator.
        """
        futures = [Future[Any]() for _ in calls]
        waiting = deque(zip(futures, calls, strict=True))
        busy: dict[Any, tuple[_Worker, Future[Any], Mapping[str, Any]]] = {}
        try:
            for future in futures:
                while not future.done():
                    while waiting and len(busy) < self._most:
                        worker = self._free()
                        busy[worker.connection] = worker, *waiting.popleft()
                        if worker.ready:
                            worker.call(busy[worker.connection][2], self.seconds)
                    self._advance(busy)
                yield future.result
        finally:
            for worker, *_ in busy.values():
                worker.kill()

    def _free(self) -> _Worker:
        with suppress(IndexError):  # none, or another thread has it
            return self._idle.pop()
        return _Worker(self.fn)

    def _advance(self, busy: dict[Any, tuple[_Worker, Future[Any], Mapping[str, Any]]]) -> None:
        nearest = min(worker.deadline for worker, *_ in busy.values())
        answered = wait([*busy], max(0.0, nearest - time.monotonic()))
        for connection, (worker, future, call) in [*busy.items()]:
            if connection in answered:
                found = worker.receive()
            elif time.monotonic() >= worker.deadline:
                slow = RuntimeError(f"its process did not load it within {LOADING_S:g} s")
                found = (LATE, None) if worker.ready else (None, slow)
                worker.ready = False
            else:
                continue
            if found is None:
                worker.call(call, self.seconds)
                continue
            del busy[connection]
            if worker.ready:
                self._idle.append(worker)
            else:
                worker.kill()
            value, error = found
            future.set_exception(error) if error else future.set_result(value)


def _end(workers: list[_Worker], owner: int) -> None:
    while workers and os.getpid() == owner:  # not in a fork
        workers.pop().kill()


def work(descriptor: int) -> None:
    """Load the function and answer calls, in a child; its parent ends the session with the run."""
    connection = Connection(descriptor)
    if os.fork():
        connection.close()
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)
    own = os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    pickled, modules = connection.recv()
    try:
        for name in modules:
            with suppress(ImportError):  # the function says what it lacks
                import_module(name)
        fn = pickle.loads(pickled)
    except BaseException as error:
        reason = f"it can't be loaded in another process: {error!r}"
        return connection.send((None, RuntimeError(reason)))
    connection.send(None)
    with suppress(EOFError):
        while True:
            answer = _answer(fn, connection.recv_bytes())
            if os.getpid() != own:  # the function has forked, and this is the child
                os._exit(0)
            connection.send(answer)


def _answer(fn: Callable[..., Any], arguments: bytes) -> tuple[Any, BaseException | None]:
    try:
        value = fn(**pickle.loads(arguments))
        if isinstance(value, list):
            return [*map(as_number, value)], None
        number = as_number(value)
        return Other(short(value)) if isnan(number) else number, None
    except BaseException as error:
        found: BaseException = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(Exception):
            if isinstance(error, Exception | SystemExit) and pickle.loads(pickle.dumps(error)):
                found = error
        found.add_note(f"In a process of its own:\n{traceback.format_exc()}")
        return None, found

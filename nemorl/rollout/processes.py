"""Calls in processes that end with a time limit: for rewards that are slow or may never return.

A server, which has imported nothing but what the function needs, forks a worker for each CPU. The
workers end with the server, and the server with the connection to the process that started it.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

import cloudpickle

from nemorl.checks import require

Function = TypeVar("Function", bound=Callable[..., Any])
LIMIT = "_limit_in_processes"
ENDED = "its process ended: it called os._exit, crashed in C, or needed too much memory"
SERVER = """
import sys
sys.path[:] = sys.argv[2:]
from nemorl.rollout.processes import serve
serve(int(sys.argv[1]))
"""


def judged_in_processes(
    *, seconds: float = 5.0, imports: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Have a reward of one response judged in processes, in parallel, with a time limit for each.

    A response that takes longer than `seconds` gets reward 0, with a warning. The function is
    pickled, and may be one of a script, a notebook or a module. `imports`: modules that it imports
    when it is called, whose import should take none of its time.

    >>> @judged_in_processes(seconds=2)
    ... def slow(prompt, response):
    ...     return float(len(response) > 3)
    """
    require(seconds > 0, "seconds", "must be positive", seconds, "5 is usual")

    def with_limit(fn: Function) -> Function:
        setattr(fn, LIMIT, (float(seconds), tuple(imports)))
        return fn

    return with_limit


LATE = object()
"""The result of a call that was ended at its time limit."""


class Processes:
    """Calls one function in other processes, from any thread; they end with this object."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.seconds: float = getattr(fn, LIMIT)[0]
        self._fn = fn
        self._lock, self._count = threading.Lock(), 0
        self._server: subprocess.Popen | None = None
        self.end: Callable[[], Any] = lambda: None
        """Ends the processes; a later call starts others."""

    def start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future:
        """Start a call; its future has the result, LATE, or what the function raised."""
        call, answer = cloudpickle.dumps((args, kwargs)), Future[Any]()
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start_server()
            self._count += 1
            self._answers[self._count] = answer
            try:
                self._connection.send((self._count, call))
            except OSError:
                _fail(self._answers)
        return answer

    def _start_server(self) -> None:
        work = cloudpickle.dumps(self._fn), *getattr(self._fn, LIMIT)
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(number), *sys.path],
            pass_fds=[number],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals are for the process that trains
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, self._server, os.getpid())
        self._answers: dict[int, Future] = {}
        threading.Thread(
            target=_receive, args=(self._connection, self._server, self._answers), daemon=True
        ).start()
        self._connection.send(work)


def _end(server: subprocess.Popen, owner: int) -> None:
    """End a server and its workers, unless this process is only a fork of the one it is for."""
    if os.getpid() == owner:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _receive(connection: Connection, server: subprocess.Popen, answers: dict[int, Future]) -> None:
    """Give the answers to those who wait, until the server has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, content = connection.recv()
            value, error = (LATE, None) if content is None else pickle.loads(content)
            future = answers.pop(number)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
    _end(server, os.getpid())
    _fail(answers)


def _fail(answers: dict[int, Future]) -> None:
    while answers:
        with contextlib.suppress(KeyError):  # another thread has it
            answers.popitem()[1].set_exception(RuntimeError("the server of its processes ended"))


def serve(descriptor: int) -> None:
    """Answer the calls that come over a connection until it closes; then end the whole session."""
    caller = Connection(descriptor)
    pickled, seconds, modules = caller.recv()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets workers that have ended
    most = len(os.sched_getaffinity(0))
    waiting: deque[tuple[int, bytes]] = deque()
    idle: list[Connection] = []
    busy: dict[Connection, tuple[int, float]] = {}
    fn = _loaded(pickled, modules)
    while True:
        for ready in wait([caller, *busy]):
            assert isinstance(ready, Connection)
            answer: bytes | None = None
            try:
                if ready is caller:
                    waiting.append(caller.recv())
                    continue
                answer = ready.recv_bytes()
                idle.append(ready)
            except (EOFError, OSError):
                if ready is caller:
                    os.killpg(0, signal.SIGKILL)
                late = time.monotonic() - busy[ready][1] >= seconds
                if not late:
                    answer = pickle.dumps((None, RuntimeError(ENDED)))
            caller.send((busy.pop(ready)[0], answer))
        while waiting and len(busy) < most:
            worker = idle.pop() if idle else _fork(fn, seconds, [caller, *busy])
            number, call = waiting.popleft()
            busy[worker] = number, time.monotonic()
            worker.send_bytes(call)


def _loaded(pickled: bytes, modules: Sequence[str]) -> Callable[..., Any]:
    """Return the function, or one that raises why it can't be had."""
    try:
        for name in modules:
            with contextlib.suppress(ImportError):  # the function says what it lacks
                import_module(name)
        return cloudpickle.loads(pickled)
    except BaseException as error:
        reason = f"it can't be loaded in another process: {error!r}"

        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(reason)

        return fails


def _fork(fn: Callable[..., Any], seconds: float, others: Sequence[Connection]) -> Connection:
    """Start a worker that answers one call after the other."""
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return ours
    try:
        for connection in (ours, *others):
            connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(os.devnull, "w") as nothing:  # noqa: PTH123
            while True:
                args, kwargs = pickle.loads(theirs.recv_bytes())
                # Its thread needs no GIL, which a function in C may keep.
                faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)
                answer = _answer(fn, args, kwargs)
                faulthandler.cancel_dump_traceback_later()
                theirs.send_bytes(answer)
    finally:
        os._exit(0)


def _answer(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the pickled result and error of a call, one of them None."""
    try:
        return pickle.dumps((fn(*args, **kwargs), None))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(f"In a process of its own:\n{text}")
        return pickle.dumps((None, error))

"""Calls in processes that end with a time limit: for rewards that are slow or may never return.

A server, which has imported nothing but what the function needs, forks a worker for each CPU: see
`process_server`. The workers end with the server, and the server with the connection to the process
that started it, which also watches that the server answers.
"""

import builtins
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

import cloudpickle
import psutil

from nemorl.checks import require
from nemorl.rollout.process_server import LARGEST_ANSWER, LOADING_S, NUMBER_SIZE

Function = TypeVar("Function", bound=Callable[..., Any])
LIMIT = "_limit_in_processes"
TICK_S, SILENT_S, ENDING_S = 1.0, 60.0, 10.0
"""How often the server is looked after, and how long it may be silent and end."""
MARK = "NEMORL_PROCESSES"
"""An environment variable by which the processes of a server are known after its death."""
SERVER = """
import sys
sys.path[:] = sys.argv[2:]
from nemorl.rollout.process_server import serve
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


@dataclass(frozen=True)
class Other:
    """A result other than a number, as errors show it."""

    shown: str

    def __repr__(self) -> str:
        return self.shown


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
        """Start a call; its future has a number, an `Other`, LATE, or what the function raised."""
        call, answer = cloudpickle.dumps((args, kwargs)), Future[Any]()
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start_server()
            self._count += 1
            self._answers[self._count] = answer
            try:
                self._connection.send((self._count, call))
            except OSError:
                _fail(self._answers, "ended")
        return answer

    def _start_server(self) -> None:
        work = cloudpickle.dumps(self._fn), *getattr(self._fn, LIMIT)
        self._connection, theirs = Pipe()
        number, mark = theirs.fileno(), secrets.token_hex(8)
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(number), *sys.path],
            pass_fds=[number],
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals are for the process that trains
        )
        theirs.close()
        whose = self._connection, mark, os.getpid()
        self.end = weakref.finalize(self, _end, self._server, *whose)
        self._answers: dict[int, Future] = {}
        threading.Thread(
            target=_receive,
            args=(self._connection, self._server, self._answers, mark),
            daemon=True,
        ).start()
        self._connection.send(work)


def _end(server: subprocess.Popen, connection: Connection, mark: str, owner: int) -> None:
    """Have a server end its workers and itself, unless this process is only a fork of the one it is
    for; kill it and what it leaves if it does not.
    """
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)
    _revive(server)
    try:
        server.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        server.kill()
    if server.wait() != 0:
        _kill_marked(mark)


def _revive(server: subprocess.Popen) -> None:
    """Continue a server that a call may have stopped."""
    server.send_signal(signal.SIGCONT)


def _kill_marked(mark: str) -> None:
    """Kill the processes that have the environment of a server."""
    found = True
    while found:
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark and process.status() != "zombie":
                    process.kill()
                    found = True


def _receive(
    connection: Connection, server: subprocess.Popen, answers: dict[int, Future], mark: str
) -> None:
    """Give the answers to those who wait, until the server has ended, or is silent too long."""
    reason, silent, limit = "ended", 0.0, LOADING_S
    with contextlib.suppress(EOFError, OSError):
        while silent < limit:
            if not connection.poll(TICK_S):  # ticks, as the machine may sleep
                silent = silent + TICK_S if answers else 0.0
                if answers:
                    _revive(server)
                continue
            message = connection.recv_bytes(NUMBER_SIZE + LARGEST_ANSWER)
            content = message[NUMBER_SIZE:]
            silent, limit = 0.0, SILENT_S
            future = answers.pop(int.from_bytes(message[:NUMBER_SIZE]), None)
            if future is None:  # all is well, or the call has failed
                continue
            try:
                future.set_result(_result(json.loads(content)) if content else LATE)
            except BaseException as error:  # also the SystemExit of a sys.exit
                future.set_exception(error)
        else:
            doing = "load the function" if limit == LOADING_S else "answer"
            reason = f"did not {doing} within {limit:g} s"
    _end(server, connection, mark, os.getpid())
    _fail(answers, reason)


def _result(answer: Mapping[str, Any]) -> Any:
    """Return the result in an answer. Raises the error in it."""
    if "number" in answer:
        return answer["number"]
    if "shown" in answer:
        return Other(answer["shown"])
    text = f"{answer['kind']}: {answer['message']}"
    error: BaseException = RuntimeError(text)
    if answer["kind"] == "ConversationFailed":
        from nemorl.rollout.conversation import ConversationFailed  # rewards start without torch

        error = ConversationFailed(answer["message"])
    kind: Any = getattr(builtins, answer["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, Exception | SystemExit)
    if known and answer["args"] is not None:
        error = kind(*answer["args"])
    if answer["note"]:
        error.add_note(answer["note"])
    raise error


def _fail(answers: dict[int, Future], reason: str) -> None:
    while answers:
        with contextlib.suppress(KeyError):  # another thread has it
            error = RuntimeError(f"the server of its processes {reason}")
            answers.popitem()[1].set_exception(error)

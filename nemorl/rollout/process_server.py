"""The server of `processes`, and its workers: a function called with a time limit that holds.

The server is one thread that never waits for a worker: it reads what has come, and kills a worker
that is late with everything that it has started. Each worker leads a session of its own. Processes
that leave it become the server's children when their parents end (a "subreaper", Linux), and are
killed there. What comes from a worker, and from the server, is data, never pickled objects, and has
a number that says to which call it belongs.
"""

import contextlib
import ctypes
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import inf, isnan
from multiprocessing.connection import Connection
from typing import Any

import psutil

from nemorl.checks import as_number, short

ENDED = (
    "its process ended: it called os._exit, crashed in C, or needed too much memory, or closed"
    " files that it had not opened"
)
GARBLED = "it wrote something other than an answer to the connection of its process"
HEADER = struct.Struct("!QI")
"""Head of a message from or to a worker: the call's number, the size of what follows. A worker's
message of size 0 says that the call begins.
"""
NUMBER_SIZE = 8
"""Bytes of the call's number, before an answer to the caller."""
LARGEST_ANSWER = 16_000
"""Bytes; the connection to the caller takes so many as a whole or not at all."""
TEXT_SIZES = 12_000, 1_500
"""Characters of an error that are kept; the second fit however they are escaped."""
LOADING_S = 600.0
"""Longest time to load the function and its modules, or to unpickle the arguments of a call."""
STOPPED = f"its process did not start the call within {LOADING_S:g} s"
ALIVE_S, STALL_S, ENDING_S = 1.0, 0.1, 5.0
"""Intervals of the server's signs of life and, during calls, of its checks for stalls of its own;
and its longest end.
"""
WAKING = signal.SIGCHLD, signal.SIGCONT
"""A process has ended: one of the server's, or the one that it is for."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def serve(descriptor: int) -> None:
    """Answer the calls that come over a connection until it closes; then end all processes."""
    caller, parent = Connection(descriptor), os.getppid()
    pickled, seconds, modules = caller.recv()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # also if a call has stopped it, or forks have `caller`
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    fn = _loaded(pickled, modules)
    _Server(caller, fn, seconds, parent).run()


def _loaded(pickled: bytes, modules: Sequence[str]) -> Callable[..., Any]:
    """Return the function, or one that raises why it can't be had."""
    try:
        for name in modules:
            with contextlib.suppress(ImportError):  # the function says what it lacks
                import_module(name)
        return pickle.loads(pickled)
    except BaseException as error:
        reason = f"it can't be loaded in another process: {error!r}"

        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(reason)

        return fails


class _Worker:
    """A process that answers one call after the other, as the server sees it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        connection.setblocking(False)
        self.number, self.deadline, self.begun, self.call = 0, inf, False, b""
        """Number, deadline and message of its call, and whether it has begun; number 0: none."""
        self.grace = 0.0
        """Seconds by which stalls may still extend the deadline. A call may cause them."""
        self.answered = False
        """Whether there was an earlier call, whose processes may stop or kill this one."""
        self.unsent, self.received = b"", bytearray()

    def give(self, number: int, call: bytes, seconds: float) -> None:
        self.number, self.call, self.begun = number, call, False
        self.grace = seconds
        self.deadline = time.monotonic() + (max(seconds, ALIVE_S) if self.answered else LOADING_S)
        self.unsent = HEADER.pack(number, len(call)) + call


class _Server:
    """Workers for the calls that come from `caller`."""

    def __init__(
        self, caller: Connection, fn: Callable[..., Any], seconds: float, parent: int
    ) -> None:
        self.caller, self.fn, self.seconds = caller, fn, seconds
        self.parent = parent
        self.most = len(os.sched_getaffinity(0))
        self.waiting: deque[tuple[int, bytes]] = deque()
        self.workers: dict[int, _Worker] = {}
        self.killed: set[int] = set()
        self.own = {child.pid for child in psutil.Process().children()}
        """Processes that the loading of the function has started."""
        self.wakes, self.wakened = socket.socketpair()
        for end in (self.wakes, self.wakened):
            end.setblocking(False)
        self.selector = selectors.PollSelector()
        self.selector.register(caller, selectors.EVENT_READ)
        self.selector.register(self.wakes, selectors.EVENT_READ)
        for number in WAKING:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wakened.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        alive = -inf
        while os.getppid() == self.parent:
            if time.monotonic() - alive >= ALIVE_S:
                alive = time.monotonic()
                self._tell(0, b"")
            nearest = min((worker.deadline for worker in self.workers.values()), default=inf)
            pause = min(max(nearest - time.monotonic(), 0), STALL_S)
            idle = all(worker.number == 0 for worker in self.workers.values())
            begin = time.monotonic()
            events = self.selector.select(None if idle else pause)
            if not idle:
                self._forgive(time.monotonic() - begin - pause)
            for key, _ in events:
                if key.fileobj is self.caller:
                    self._take()
                elif key.fileobj is self.wakes:
                    self.wakes.recv(4096)
                    self._reap()
                elif key.data in self.workers.values():  # it may have been killed meanwhile
                    self._exchange(key.data)
            self._end_late_calls()
            self._hand_out()
        self._end()

    def _take(self) -> None:
        try:
            self.waiting.append(self.caller.recv())
        except (EOFError, OSError):
            self._end()

    def _tell(self, number: int, content: bytes) -> None:
        """Send an answer; empty: there was none in time, and with the number 0: all is well."""
        try:
            self.caller.send_bytes(number.to_bytes(NUMBER_SIZE) + content)
        except OSError:
            self._end()

    def _hand_out(self) -> None:
        """Give the calls that wait to workers, as many as there are CPUs."""
        while self.waiting:
            idle = [worker for worker in self.workers.values() if worker.number == 0]
            if not idle and len(self.workers) == self.most:
                return
            worker = idle[0] if idle else self._fork()
            worker.give(*self.waiting.popleft(), self.seconds)
            self._exchange(worker)

    def _forgive(self, stalled: float) -> None:
        """Give the workers the time in which this process should have run, and did not: the machine
        was stopped, or has too much to do.
        """
        for worker in self.workers.values():
            extra = min(max(stalled, 0), worker.grace)
            worker.deadline += extra
            worker.grace -= extra

    def _end_late_calls(self) -> None:
        for worker in list(self.workers.values()):
            if time.monotonic() >= worker.deadline:
                self._exchange(worker)  # it may have answered while this process was stopped
            if self.workers.get(worker.pid) is worker and time.monotonic() >= worker.deadline:
                self._lose(worker, b"" if worker.begun else _refusal(STOPPED))

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                ours.close()
                signal.set_wakeup_fd(-1)
                for number in WAKING:
                    signal.signal(number, signal.SIG_DFL)
                for key in list(self.selector.get_map().values()):
                    os.close(key.fd)
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == server:
                    _work(self.fn, theirs)
            finally:
                os._exit(0)
        theirs.close()
        worker = self.workers[pid] = _Worker(pid, ours)
        self.selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _exchange(self, worker: _Worker) -> None:
        """Send and receive what is possible at once."""
        try:
            while worker.unsent:
                worker.unsent = worker.unsent[worker.connection.send(worker.unsent[: 1 << 20]) :]
        except BlockingIOError:
            pass
        except OSError:
            worker.unsent = b""  # it has ended, as reading shows
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self.selector.modify(worker.connection, events, worker)
        try:
            while self.workers.get(worker.pid) is worker:
                found = worker.connection.recv(1 << 16)
                worker.received += found
                if not found:
                    self._lose(worker, _refusal(ENDED))
                else:
                    self._read(worker)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(worker, _refusal(ENDED))

    def _read(self, worker: _Worker) -> None:
        """Read the messages that have come as a whole."""
        while len(worker.received) >= HEADER.size:
            number, size = HEADER.unpack_from(worker.received)
            if number != worker.number or number == 0 or size > LARGEST_ANSWER:
                return self._lose(worker, _refusal(GARBLED))
            if len(worker.received) < HEADER.size + size:
                return None
            content = bytes(worker.received[HEADER.size : HEADER.size + size])
            del worker.received[: HEADER.size + size]
            if content:
                worker.number, worker.deadline, worker.answered = 0, inf, True
                self._tell(number, content)
            elif worker.begun:
                return self._lose(worker, _refusal(GARBLED))
            else:
                worker.begun, worker.deadline = True, time.monotonic() + self.seconds
        if worker.received and not worker.number:
            self._lose(worker, _refusal(GARBLED))
        return None

    def _lose(self, worker: _Worker, answer: bytes) -> None:
        """Kill a worker. Its call gets an answer, or a new worker if it was not the first here and
        has not begun.
        """
        self._kill(worker)
        if worker.number and worker.answered and not worker.begun:
            self.waiting.appendleft((worker.number, worker.call))
        elif worker.number:
            self._tell(worker.number, answer)

    def _kill(self, worker: _Worker) -> None:
        """Kill a worker and its session."""
        del self.workers[worker.pid]
        self.selector.unregister(worker.connection)
        worker.connection.close()
        self.killed.add(worker.pid)
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(worker.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Forget processes that have ended, and kill what killed ones have left."""
        sweeps = False
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid
                if worker := self.workers.get(pid):
                    self._exchange(worker)  # it may have answered
                if pid in self.workers:  # a child of its own still holds the connection
                    self._lose(self.workers[pid], _refusal(ENDED))
                sweeps |= pid in self.killed
                self.killed.discard(pid)
                self.own.discard(pid)
                os.waitpid(pid, 0)
        if sweeps:
            self._sweep()

    def _sweep(self) -> None:
        """Kill children that belong to no living worker; their own come here when they end."""
        for child in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):
                pids = child.pid, os.getsid(child.pid)  # a new worker leads no session yet
                kept = child.pid in self.own or not self.workers.keys().isdisjoint(pids)
                if not kept and child.pid not in self.killed:
                    self.killed.add(child.pid)
                    os.kill(child.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Kill all processes, and exit with 0 once there are none."""
        for worker in list(self.workers.values()):
            self._kill(worker)
        self.own.clear()
        deadline = time.monotonic() + ENDING_S
        while psutil.Process().children() and time.monotonic() < deadline:
            self._sweep()
            self._reap()
            time.sleep(0.005)
        os._exit(bool(psutil.Process().children()))


def _work(fn: Callable[..., Any], connection: socket.socket) -> None:
    """Answer one call after the other, in a worker."""
    worker = os.getpid()
    with connection.makefile("rb") as calls:
        while header := calls.read(HEADER.size):
            number, size = HEADER.unpack(header)
            args, kwargs = pickle.loads(calls.read(size))
            connection.sendall(HEADER.pack(number, 0))
            answer = _answer(fn, args, kwargs)
            if os.getpid() != worker:
                return  # the function has forked, and this is the child
            connection.sendall(HEADER.pack(number, len(answer)) + answer)


def _answer(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return what a call gave as JSON: a number, a text instead of another value, or an error."""
    try:
        value = fn(*args, **kwargs)
        number = as_number(value)
        return json.dumps({"shown": short(value)} if isnan(number) else {"number": number}).encode()
    except BaseException as error:
        kind, simple = type(error), (str, int, float, bool, type(None))
        plain = kind.__module__ == "builtins" and {*map(type, error.args)} <= {*simple}
        return _of_error(
            "ConversationFailed" if _fails_alone(error) else kind.__name__,
            list(error.args) if plain else None,
            str(error),
            f"In a process of its own:\n{traceback.format_exc()}",
        )


def _fails_alone(error: BaseException) -> bool:
    """Return whether it is a ConversationFailed, of which a process without nemorl has none."""
    module = sys.modules.get("nemorl.rollout.conversation")
    return module is not None and isinstance(error, module.ConversationFailed)


def _refusal(reason: str) -> bytes:
    return _of_error("RuntimeError", [reason], reason, "")


def _of_error(kind: str, args: list[Any] | None, message: str, note: str) -> bytes:
    """Return an error as JSON, its texts shortened until they fit."""
    for size in TEXT_SIZES:
        if len(message) > size // 2 or len(repr(args)) > size // 2:
            args, message = None, message[: size // 2]
        found = {"kind": kind[:100], "args": args, "message": message, "note": note[-size // 2 :]}
        text = json.dumps(found, ensure_ascii=False).encode(errors="backslashreplace")
        if len(text) <= LARGEST_ANSWER:
            return text
    raise AssertionError

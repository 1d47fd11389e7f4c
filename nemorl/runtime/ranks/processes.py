"""Ranks as processes of this machine, which their driver starts, talks to through pipes, and takes
along when it ends, however that comes.
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemorl.runtime.cluster.worker_host import MARKER, kill_family, start_guard
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.group import Place, Status
from nemorl.runtime.ranks.wire import dumps, loads
from nemorl.runtime.run.errors import WorkerDied
from nemorl.runtime.start.registry import get_training_backend

PROGRAM = Path(__file__).with_name("rank_process.py")
STATUS = "status"
"""Instead of a method: a question that is answered while a method runs."""


@dataclass(kw_only=True)
class _Process:
    """One rank, as its driver knows it."""

    rank: int
    marker: str
    log: Path
    popen: subprocess.Popen
    connection: Connection
    outbox: "queue.SimpleQueue[tuple[bytes, ...] | None]" = field(default_factory=queue.SimpleQueue)

    def state(self) -> str:
        """The kernel's letter for what it is doing: R, S, D, T (stopped), Z; "" where there is none."""
        with suppress(OSError):
            return (
                Path(f"/proc/{self.popen.pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[0]
            )
        return ""


class LocalCall:
    """A call on its way to all ranks."""

    def __init__(self, group: LocalRankGroup) -> None:
        self._group = group
        self.answers: dict[int, Any] = {}

    def poll(self, wait_s: float) -> Mapping[int, Any]:
        deadline, seen = time.monotonic() + wait_s, len(self.answers)
        with self._group.arrived:
            while (
                len(self.answers) == seen
                and len(self.answers) < self._group.size
                and (left := deadline - time.monotonic()) > 0
            ):
                self._group.arrived.wait(left)
        self._group.check(set(range(self._group.size)) - set(self.answers))
        return dict(self.answers)


class LocalRankGroup:
    """One process per rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment.

    All that a rank and its children write goes into `log_dir`/rank-N.log. They are in sessions of
    their own, so that a Ctrl-C is the driver's alone.
    """

    def __init__(self, backend: str, size: int, *, log_dir: Path, runtime: RuntimeConfig) -> None:
        self.size, self.arrived = size, threading.Condition()
        self._lock, self._tickets, self._ended = threading.Lock(), 0, False
        self._calls: weakref.WeakValueDictionary[int, LocalCall] = weakref.WeakValueDictionary()
        self._processes: list[_Process] = []
        self._guard: subprocess.Popen | None = None
        hello = {
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "backend": dumps(get_training_backend(backend)),
            "size": size,
        }
        port, folder = free_port(), log_dir.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(size):
                variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                             "MASTER_PORT": port, "OMP_NUM_THREADS": runtime.cpus_per_rank}  # fmt: skip
                self._processes.append(
                    _launch(
                        rank,
                        folder / f"rank-{rank}.log",
                        {name: str(value) for name, value in variables.items()},
                    )
                )
            self._guard = start_guard(others=[process.popen.pid for process in self._processes])
            for process in self._processes:
                process.outbox.put((pickle.dumps({**hello, "rank": process.rank}),))
                for target in (self._send, self._receive):
                    threading.Thread(
                        target=target,
                        args=(process,),
                        name=f"rank-{process.rank}-{target.__name__}",
                        daemon=True,
                    ).start()
        except BaseException:
            self.shutdown(0)
            raise

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> LocalCall:
        return self._start(method, dumps((args, kwargs)))

    def place(self, rank: int) -> Place:
        process = self._processes[rank]
        return Place(rank=rank, host=socket.gethostname(), pid=process.popen.pid, log=process.log)

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        call, deadline = self._start(STATUS, b""), time.monotonic() + timeout_s
        while len(call.answers) < self.size and (left := deadline - time.monotonic()) > 0:
            with suppress(WorkerDied):
                call.poll(left)
        return {
            rank: answer
            for rank, answer in sorted(call.answers.items())
            if isinstance(answer, Status)
        }

    def note(self, rank: int) -> str:
        stopped = self._processes[rank].state() in ("T", "t")
        return (
            "its process is stopped (SIGSTOP or a debugger)"
            if stopped
            else "it does not even say what it is doing"
        )

    def check(self, ranks: set[int]) -> None:
        """Raise WorkerDied if one of these is gone."""
        if self._ended:
            raise RuntimeError("the ranks have been shut down: set the trainer up anew")
        for process in (self._processes[rank] for rank in sorted(ranks)):
            code = process.popen.poll()
            if code is not None:
                place, reason = self.place(process.rank), told_exit(code)
                raise WorkerDied(
                    f"{place} died: {reason}",
                    rank=place.rank,
                    host=place.host,
                    pid=place.pid,
                    reason=reason,
                )

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        with self._lock:
            if self._ended:
                return
        if timeout_s > 0:
            with suppress(WorkerDied):
                call, deadline = self.start("shutdown"), time.monotonic() + timeout_s
                while len(call.poll(0.1)) < self.size and time.monotonic() < deadline:
                    pass
        with self._lock:
            self._ended = True
        leaders = [
            process.popen.pid if process.popen.poll() is None else 0 for process in self._processes
        ]  # 0: its id may be another's by now
        for (
            process
        ) in self._processes:  # first all ranks, so that none waits for another or complains of it
            process.popen.kill()
        for process, leader in zip(self._processes, leaders, strict=True):
            kill_family(leader, process.marker)
            process.popen.wait()
            process.outbox.put(None)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()

    def _start(self, method: str, payload: bytes) -> LocalCall:
        call = LocalCall(self)
        with self._lock:  # every rank gets the calls in the same order
            if self._ended:
                raise RuntimeError("the ranks have been shut down: set the trainer up anew")
            self._tickets += 1
            self._calls[self._tickets] = call
            message = pickle.dumps((self._tickets, method)), payload
            for process in self._processes:
                process.outbox.put(message)
        return call

    def _send(self, process: _Process) -> None:
        """On a thread per rank: a rank that stands still does not read, and must not keep the
        others waiting.
        """
        with suppress(OSError):  # it is gone, as `check` will find
            while (message := process.outbox.get()) is not None:
                for part in message:
                    process.connection.send_bytes(part)

    def _receive(self, process: _Process) -> None:
        with suppress(EOFError, OSError):
            while True:
                ticket, answer = loads(process.connection.recv_bytes())
                with self.arrived:
                    call = self._calls.get(ticket)  # none where nobody waits any more
                    if call is not None:
                        call.answers[process.rank] = answer
                    self.arrived.notify_all()
        with self.arrived:
            self.arrived.notify_all()


def _launch(rank: int, log: Path, variables: Mapping[str, str]) -> _Process:
    marker = uuid.uuid4().hex
    environment = {**os.environ, **variables, MARKER: marker}
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as output:
        command = [sys.executable, "-P", "-u", str(PROGRAM), str(theirs.fileno())]
        popen = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=output)  # fmt: skip
    return _Process(
        rank=rank, marker=marker, log=log, popen=popen, connection=Connection(ours.detach())
    )


def free_port() -> int:
    """A port that nobody listens on, outside of the range from which the kernel gives ports to
    those who connect.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def told_exit(code: int) -> str:
    """What became of a process, by its exit code.

    >>> told_exit(1), told_exit(-15)
    ('it ended with exit code 1', 'it was killed by SIGTERM')
    """
    if code >= 0:
        return f"it ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"it was killed by {name}" + (
        " (the kernel does so, too, when memory is short)" if name == "SIGKILL" else ""
    )

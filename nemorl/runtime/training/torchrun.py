"""Ranks that torchrun has started: rank 0 drives and computes, the others follow it through a gloo group of their own."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from nemorl.checks import require
from nemorl.parallel.dtensor.mesh import start_process_group
from nemorl.runtime.registry import get_training_backend
from nemorl.runtime.runtime_config import RuntimeConfig
from nemorl.runtime.training.group import ALONE_S, Answer, Place, Status, hung
from nemorl.runtime.training.rank import BESIDE, IDLE, TrainingRank
from nemorl.runtime.training.wire import dumps, loads

PATIENCE = timedelta(days=7)
"""Followers wait for as long as rank 0 generates, loads data or waits for a debugger; torchrun ends them when rank 0 dies."""
HEARTBEAT_S = 1.0
FOLLOWERS_LATER_S = 15.0
"""After rank 0, which can tell what every rank was doing, the others end themselves if rank 0 does not."""
_RUNS = itertools.count()
"""The same on all ranks: which of the runs of these processes it is."""


class Peers:
    """The processes of one torchrun, as one of them knows the others: a collective call makes it.

    Calls come by broadcast; who has returned from one is counted in the rendezvous' store, which still works where a collective hangs.
    """

    def __init__(self, backend: str, device: str | None) -> None:
        start_process_group(device, timeout=PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.store = dist.PrefixStore(f"nemorl/{next(_RUNS)}", dist.distributed_c10d._get_default_store())
        self.host = TrainingRank(lambda: get_training_backend(backend)(), self.rank, transport="direct")
        self._tell(f"place/{self.rank}", (socket.gethostname(), os.getpid()))
        self._finished: list[int] = []
        self._over = threading.Event()
        self._limit_s = float("inf")
        dist.barrier(self.control)
        threading.Thread(target=self._watch, name="nemorl-watch", daemon=True).start()

    def broadcast(self, message: Any = None) -> Any:
        """Rank 0's message."""
        found = [message]
        dist.broadcast_object_list(found, src=0, group=self.control)
        return found[0]

    def perform(self, method: str, args: tuple, kwargs: Mapping[str, Any], limit_s: float) -> Answer:
        """This rank's part of a call, which may take so long."""
        self._limit_s = limit_s
        try:
            return self.host.perform(method, args, kwargs)
        finally:
            self._limit_s = float("inf")

    def report(self, ticket: int, answer: Answer) -> None:
        """Count this rank among those that have returned from a call."""
        if answer.kind == "error":
            self._tell(f"failed/{ticket}/{self.rank}", (answer.value, answer.step))
            self.store.add(f"failures/{ticket}", 1)
        self.store.add(f"returned/{ticket}", 1)

    def returned(self, ticket: int, wait_s: float) -> bool:
        """Whether all have, after waiting so long at most."""
        deadline, pause = time.monotonic() + wait_s, 0.0005
        while self.store.add(f"returned/{ticket}", 0) < self.size:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def failures(self, ticket: int) -> dict[int, Answer]:
        """The errors of a call that there are so far."""
        if not self.store.add(f"failures/{ticket}", 0):
            return {}
        keys = {rank: f"failed/{ticket}/{rank}" for rank in range(self.size)}
        found = {rank: loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        return {rank: Answer("error", words, step) for rank, (words, step) in found.items()}

    def finished(self, ticket: int) -> None:
        """All have returned from a call, and so they know of all before it that they have: the store may forget those."""
        for key in [f"{what}/{old}" for old in self._finished for what in ("returned", "failures")]:
            self.store.delete_key(key)
        self._finished = [ticket]

    def place(self, rank: int) -> Place:
        host, pid = loads(self.store.get(f"place/{rank}"))
        return Place(rank=rank, host=host, pid=pid, log=None)

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        """Of those whose heart beats within this time. (Their clocks may differ.)"""
        self._beat()
        before = self._heartbeats()
        time.sleep(timeout_s)
        self._beat()
        now = self._heartbeats()
        return {rank: loads(now[rank])[1] for rank in now if rank in before and now[rank] != before[rank]}

    def _heartbeats(self) -> dict[int, bytes]:
        keys = {rank: f"status/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key) for rank, key in keys.items() if self.store.check([key])}

    def _tell(self, key: str, value: Any) -> None:
        self.store.set(key, dumps(value))  # type: ignore[arg-type]  # it takes bytes as well

    def _beat(self) -> None:
        self._tell(f"status/{self.rank}", (time.monotonic(), self.host.status()))

    def _watch(self) -> None:
        """Tell the others what this rank is doing; end the process when a call takes too long: nothing else gets it out of a collective."""
        with suppress(dist.DistError):  # rank 0, which has the store, is gone: torchrun ends this process, or the next call does
            while not self._over.wait(HEARTBEAT_S):
                self._beat()
                status = self.host.status()
                if status.phase != IDLE and status.seconds > self._limit_s + (FOLLOWERS_LATER_S if self.rank else 0.0):
                    phase = f"{status.phase} after {status.step} optimizer steps"
                    missing = [rank for rank in range(self.size) if rank != self.rank] if self.size > 1 else [0]
                    end(str(hung(self, phase, missing, f"{self._limit_s:g} s")))

    def note(self, rank: int) -> str:
        return "it does not even say what it is doing: it is stopped, or gone"

    def close(self) -> None:
        """The run is over; the process group stays for the next one."""
        self._over.set()


class TorchrunGroup:
    """The ranks of a torchrun as rank 0 sees them, itself among them: what it starts it has done when `start` returns."""

    def __init__(self, backend: str, size: int, *, device: str | None, runtime: RuntimeConfig) -> None:
        self._peers = Peers(backend, device)
        require(size == self._peers.size, "parallel", f"must ask for the {self._peers.size} processes that torchrun has started", size,
                "change a degree, or --nproc-per-node")  # fmt: skip
        self.size, self._runtime = size, runtime
        self._lock, self._tickets, self._ended = threading.Lock(), itertools.count(), False

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> LeaderCall:
        limit_s = self._runtime.start_timeout_s if method == "setup" else self._runtime.timeout_s
        payload = dumps((args, kwargs))  # what can't be sent is nobody's call
        with signals_held():  # the others are in the midst of a collective where this rank leaves one
            with self._lock:  # every rank gets the calls in the same order
                ticket = next(self._tickets)
                self._peers.broadcast((ticket, method, limit_s, payload))
            if method not in BESIDE:
                answer = self._peers.perform(method, args, kwargs, limit_s)
                self._peers.report(ticket, answer)
                return LeaderCall(self._peers, ticket, answer)
        answer = self._peers.host.beside(method, args, kwargs)
        if isinstance(answer.error, KeyboardInterrupt | SystemExit):
            raise answer.error
        self._peers.report(ticket, answer)
        return LeaderCall(self._peers, ticket, answer)

    def place(self, rank: int) -> Place:
        return self._peers.place(rank)

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        return self._peers.statuses(timeout_s)

    def note(self, rank: int) -> str:
        return self._peers.note(rank)

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        """Followers that don't hear of it (they hang, or `timeout_s` is 0) are ended by torchrun when this process ends."""
        if self._ended:
            return
        self._ended = True
        if timeout_s > 0:
            message = (next(self._tickets), "shutdown", timeout_s, dumps(farewell))
            told = threading.Thread(target=self._say, args=(message,), daemon=True)  # which hangs where a follower does
            told.start()
            told.join(timeout_s)
        self._peers.host.perform("shutdown", (), {})
        self._peers.close()

    def _say(self, message: Any) -> None:
        with suppress(RuntimeError):  # a follower that is gone needs no farewell; torchrun ends the others
            self._peers.broadcast(message)


class LeaderCall:
    """A call that rank 0 has returned from, and the others perhaps not yet."""

    def __init__(self, peers: Peers, ticket: int, answer: Answer) -> None:
        self._peers, self._ticket, self._answer = peers, ticket, answer

    def poll(self, wait_s: float) -> Mapping[int, Answer]:
        own = {0: self._answer}
        everyone = self._peers.returned(self._ticket, wait_s)
        failed = self._peers.failures(self._ticket)
        if everyone:
            self._peers.finished(self._ticket)
            own = {rank: Answer("value", None, self._answer.step) for rank in range(self._peers.size)} | own
        return own | {rank: answer for rank, answer in failed.items() if rank}


def follow(backend: str, *, timeout_s: float, device: str | None) -> Any:
    """What the ranks other than 0 do until rank 0 shuts them down; returns what it says then."""
    peers = Peers(backend, device)
    with _signals_left_to_rank_zero():
        while True:
            ticket, method, limit_s, payload = peers.broadcast()
            if method == "shutdown":
                peers.host.perform("shutdown", (), {})
                peers.close()
                return loads(payload)
            args, kwargs = loads(payload)
            if method in BESIDE:
                threading.Thread(target=lambda t, *call: peers.report(t, peers.host.beside(*call)), args=(ticket, method, args, kwargs)).start()
                continue
            answer = peers.perform(method, args, kwargs, limit_s if method == "setup" else timeout_s)
            peers.report(ticket, answer)
            if answer.kind == "error" and not peers.returned(ticket, 2 * ALONE_S):
                end(f"{peers.place(peers.rank)} failed alone in {method} after {answer.step} optimizer steps:\n{answer.value['traceback']}")


def end(message: str) -> None:
    """End this process, whatever its threads are at."""
    sys.stdout.flush()
    os.write(2, f"{message}\n".encode())
    os._exit(1)


@contextmanager
def signals_held() -> Iterator[None]:
    """A block that neither SIGINT nor SIGTERM parts: they come to whoever handles them when it is over, each once. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():  # signals don't come here
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if number not in held:
            held.append(number)

    def deliver() -> None:
        with ExitStack() as stack:  # all of them, though the first one raises
            for number in reversed(held):
                stack.callback(signal.raise_signal, number)

    with ExitStack() as stack:
        stack.callback(deliver)
        for number in (signal.SIGINT, signal.SIGTERM):
            if (before := signal.getsignal(number)) is not None:  # None: not Python's
                stack.callback(signal.signal, number, before)
                signal.signal(number, hold)
        yield


@contextmanager
def _signals_left_to_rank_zero() -> Iterator[None]:
    """Ctrl-C and SIGTERM reach all processes of the job: rank 0 saves and shuts down, for which it needs the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

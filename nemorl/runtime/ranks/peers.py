"""The processes of one torchrun, as one of them knows the others: calls and answers, heartbeats,
and what is to be done when one of them dies.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemorl.parallel.dtensor.mesh import start_process_group
from nemorl.runtime.ranks.following import tell_torchrun
from nemorl.runtime.ranks.group import Answer, Place, Standstill, Status, died, hung
from nemorl.runtime.ranks.old_signals import SignalEar
from nemorl.runtime.ranks.rank import IDLE, TrainingRank
from nemorl.runtime.ranks.wire import dumps, loads
from nemorl.runtime.run.errors import WorkerDied
from nemorl.runtime.start.registry import get_training_backend

PATIENCE = timedelta(days=7)
"""Followers wait for as long as rank 0 generates, loads data or waits for a debugger; torchrun ends
them when rank 0 dies.
"""
HEARTBEAT_S = 1.0
SILENT_S = 5.0
"""Without a heartbeat: a rank on another machine whose connections are gone, too, is dead."""
FOLLOWERS_LATER_S = 15.0
"""After rank 0, which can tell what every rank was doing, the others end themselves if rank 0 does
not.
"""
STUCK_S = 5.0
"""For rank 0 to come out of a collective with a rank that has died: gloo lets it go at once, NCCL
perhaps never.
"""
LEFT_ALONE_S = 10.0
"""For rank 0 to tell of a death before the others end by themselves."""
GIVEN_UP_S = 180.0
"""For rank 0 to end after it has given up the ranks: it closes loggers and engines, and tells why.
torchrun would cut it short when another ends.
"""
STORE_FAILURES = 5
"""In a row, before a rank gives up the store."""
PAUSE = "the wait for rank 0's next call"
_RUNS = itertools.count()
"""The same on all ranks: which of the runs of these processes it is."""


class Peers:
    """The processes of one torchrun, as one of them knows the others: a collective call makes it.

    Calls come by broadcast; who has returned from one is counted in the rendezvous' store, which
    still works where a collective hangs.
    """

    def __init__(self, backend: str, device: str | None) -> None:
        start_process_group(device, timeout=PATIENCE)
        self._older = set(_groups())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.store = dist.PrefixStore(
            f"nemorl/{next(_RUNS)}", dist.distributed_c10d._get_default_store()
        )
        self.host = TrainingRank(
            lambda: get_training_backend(backend)(), self.rank, transport="direct"
        )
        self._places: list[Any] = [None] * self.size
        own = (socket.gethostname(), os.getpid(), (os.getppid(), _namespace()))
        dist.all_gather_object(self._places, own, group=self.control)
        self._siblings = [
            rank
            for rank, (host, _, agent) in enumerate(self._places)
            if (host, agent) == (own[0], own[2]) and rank != self.rank
        ]
        self._finished: list[int] = []
        self._over = threading.Event()
        self._limit_s, self._at = float("inf"), PAUSE
        self._death: WorkerDied | None = None
        self._lonely_since: float | None = None
        self.ear, self._still = SignalEar(), Standstill()
        self._watching = threading.Thread(target=self._watch, name="nemorl-watch", daemon=True)
        self._watching.start()

    def broadcast(self, message: Any = None) -> Any:
        """Rank 0's message."""
        found = [message]
        dist.broadcast_object_list(found, src=0, group=self.control)
        return found[0]

    def perform(
        self, method: str, args: tuple, kwargs: Mapping[str, Any], limit_s: float
    ) -> Answer:
        """This rank's part of a call, which may take so long."""
        self._limit_s, self._at = limit_s, method
        try:
            answer = self.host.perform(method, args, kwargs)
            self._at = (
                method if answer.kind == "error" else PAUSE
            )  # an error may come of a death, which is told with what all were at
            return answer
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
        found = {
            rank: loads(self.store.get(key))
            for rank, key in keys.items()
            if self.store.check([key])
        }
        return {rank: Answer("error", words, step) for rank, (words, step) in found.items()}

    def finished(self, ticket: int) -> None:
        """All have returned from a call, and so they know of all before it that they have: the
        store may forget those.
        """
        for key in [f"{what}/{old}" for old in self._finished for what in ("returned", "failures")]:
            self.store.delete_key(key)
        self._finished = [ticket]

    def place(self, rank: int) -> Place:
        host, pid, _ = self._places[rank]
        return Place(rank=rank, host=host, pid=pid, log=None)

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        """Of those whose heart beats within this time. (Their clocks may differ.)"""
        self._beat()
        before = self._heartbeats()
        time.sleep(timeout_s)
        self._beat()
        now = self._heartbeats()
        return {
            rank: loads(now[rank])[1]
            for rank in now
            if rank in before and now[rank] != before[rank]
        }

    def _heartbeats(self) -> dict[int, bytes]:
        keys = {rank: f"status/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key) for rank, key in keys.items() if self.store.check([key])}

    def _tell(self, key: str, value: Any) -> None:
        self.store.set(key, dumps(value))  # type: ignore[arg-type]  # it takes bytes as well

    def _beat(self) -> None:
        self._tell(f"status/{self.rank}", (time.monotonic(), self.host.status()))

    def death(self, *, silent: bool = False) -> WorkerDied | None:
        """That of another rank, if one has died: of the same torchrun agent, or as others have
        told; with `silent` also one whose heart has stopped.

        The kernel has taken a process away before its agent sends the others SIGTERM: whoever asks
        then has the answer.
        """
        with suppress(dist.DistError):
            if self._death is None and not self._over.is_set():
                gone = [
                    rank
                    for rank in self._siblings
                    if not _lives(self._places[rank][1]) and not self._has_left(rank)
                ]
                if gone:
                    self._tell("dead", gone[0])
                elif not self.store.check(["dead"]) and silent:
                    alive = {self.rank, *self._siblings, *self.statuses(SILENT_S)}
                    gone = [
                        rank
                        for rank in range(self.size)
                        if rank not in alive and not self._has_left(rank)
                    ]
                elif self.store.check(["dead"]):
                    gone = [loads(self.store.get("dead"))]
                if gone and gone[0] != self.rank:
                    self._death = self._died(gone[0])
        return self._death

    def _died(self, rank: int) -> WorkerDied:
        reason = (
            "its process is gone; it was killed (the kernel does so, too, when memory is short) or"
            " it crashed"
        )
        return died(
            self.place(rank), f"{self._at} after {self.host.status().step} optimizer steps", reason
        )

    def _has_left(self, rank: int) -> bool:
        return self.store.check([f"left/{rank}"])

    def _watch(self) -> None:
        """Tell the others what this rank is doing; end the process when a call takes too long or
        others are gone: nothing else gets it out of a collective.
        """
        failures = 0
        while failures < STORE_FAILURES and not self._over.wait(HEARTBEAT_S):
            try:
                self._beat()
                self._check_time()
                if (death := self.death()) is not None or self._left_by_rank_zero():
                    self._end_without(death)
                failures = 0
            except dist.DistError:  # where the store is gone, so is rank 0, if it had it: torchrun's agent ends this process, or the next call does
                failures += 1
                if (
                    not self._over.is_set()
                    and self.rank == 1
                    and 0 in self._siblings
                    and not _lives(self._places[0][1])
                ):
                    end(str(self._died(0)))

    def _left_by_rank_zero(self) -> bool:
        return self.rank > 0 and self._has_left(0) and not loads(self.store.get("left/0"))

    def _check_time(self) -> None:
        status = self.host.status()
        if status.phase == IDLE:
            self._still = Standstill()
            return
        phase = f"{status.phase} after {status.step} optimizer steps"
        if status.seconds > self._limit_s + (FOLLOWERS_LATER_S if self.rank else 0.0):
            missing = (
                [rank for rank in range(self.size) if rank != self.rank] if self.size > 1 else [0]
            )
            self.end(str(hung(self, phase, missing, f"{self._limit_s:g} s")))
        if self.rank == 0 and self.ear.heard() and self.size > 1:
            statuses = {rank: loads(beat)[1] for rank, beat in self._heartbeats().items()} | {
                0: status
            }
            if (limit_s := self._still.limit(statuses, self.size)) is not None:
                within = f"{limit_s:g} s after a signal, in which no rank moved"
                self.end(
                    str(hung(self, phase, list(range(1, self.size)), within)), 128 + self.ear.number
                )

    def _end_without(self, death: WorkerDied | None) -> None:
        """End this process after a death, or where rank 0 has given up its followers; who has
        something to tell goes first.
        """
        since = self._lonely_since = self._lonely_since or time.monotonic()
        waited = time.monotonic() - since
        if death is not None and self.rank == 0:
            if self.host.status().phase != IDLE and waited > STUCK_S:
                self.end(str(death))
        elif death is not None and death.rank == 0:
            if self.store.add("told", 1) == 1:
                self.end(str(death))
            self.end()
        elif (self.ear.heard() and self._has_left(0)) or waited > (
            GIVEN_UP_S if death is None else LEFT_ALONE_S
        ):
            self.end()

    def end(self, message: str = "", code: int = 1) -> None:
        """End this process, whatever its threads are at.

        Without a word where others speak, and then without fault if torchrun has told it to end.
        """
        with suppress(dist.DistError):
            self._tell(f"left/{self.rank}", False)
        if not message:
            tell_torchrun(str(self._death or f"{self.place(0)} has ended the run, and tells why"))
            code = 0 if self.ear.heard() else code
        end(message, code)

    def wait_for_the_end(self) -> None:
        """After an error that comes of the end of another rank: the watch ends this process once it
        is known what has happened.
        """
        time.sleep(2 * LEFT_ALONE_S)

    def note(self, rank: int) -> str:
        return "it does not even say what it is doing: it is stopped, or gone"

    def leave(self) -> None:
        """What goes on from here is the end of the run in order: a process that is gone is no death
        any more.
        """
        self._over.set()

    def close(self, *, in_order: bool) -> None:
        """The run is over.

        Its process groups end with it; torch's own stays for the next run, which the store would
        mistake for this one.
        """
        self._over.set()
        with suppress(dist.DistError):
            self._tell(f"left/{self.rank}", in_order)
        self._watching.join(SILENT_S)
        if (
            not self._watching.is_alive()
        ):  # it listens, and must not do so at a descriptor that is another's by then
            self.ear.close()
        if in_order:
            for group in reversed([group for group in _groups() if group not in self._older]):
                dist.destroy_process_group(group)


def end(message: str, code: int = 1) -> None:
    """End this process, whatever its threads are at."""
    with suppress(Exception):
        sys.stdout.flush()
    if message:
        tell_torchrun(message)
        os.write(2, f"{message}\n".encode())
    os._exit(code)


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _lives(pid: int) -> bool:
    """Whether a process of this machine is there, and no zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
            not in "ZX"
        )
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self").exists()  # a system that can't tell
    except OSError:  # this process has no descriptor left, say: that is no death
        return True


def _namespace() -> tuple[str, str]:
    """Within which process ids mean the same: containers have their own."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink()), Path(
            "/proc/sys/kernel/random/boot_id"
        ).read_text(encoding="utf-8")
    return "", ""

"""Ranks as their driver sees them, wherever they run: calls that go to all of them, and what is
said when one dies, hangs or fails alone.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from nemorl.runtime.ranks.old_signals import signal_came
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout, last_lines, raised

TICK_S = 0.25
"""How often those who wait look whether all ranks are there."""
ALONE_S = 10.0
"""How long is waited for the other ranks once one has failed: an error of all of them leaves them
usable, one rank's alone ends them.
"""
STATUS_S = 3.0
"""For ranks to say what they are doing, when they have not answered in time."""
SIGNAL_S = 20.0
"""Once a signal has come: how long ranks may wait for one another while none of them moves."""
LOOK_S = 3.0
"""How often it is looked then whether they move, which takes up to STATUS_S."""
BLIND_S = 60.0
"""The same where nobody can be seen to wait, as on GPUs, where collectives run beside Python."""


@dataclass(frozen=True)
class Answer:
    """What a rank made of a call."""

    kind: Literal["value", "error"]
    value: Any
    """Rank 0's result (other ranks have none), or an error in words (see `worker_host.guarded`)."""
    step: int
    """Optimizer steps begun, after the call."""
    error: BaseException | None = None
    """The error itself, of a rank that is in the driver's process."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    log: Path | None
    """What it writes to; None where that is not ours to know."""
    here: bool = True
    """Whether that is a file on this machine."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid} on"
            f" {self.host}{f', log {self.log}' if self.log else ''})"
        )


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a rank says that it is doing."""

    rank: int
    step: int
    """Optimizer steps begun."""
    phase: str
    """The method that runs; "waiting for a call" where there is none."""
    seconds: float
    """For how long."""
    frames: tuple[str, ...]
    """Where in the code it is, innermost first: file:line function."""

    @property
    def waits_for_others(self) -> bool:
        """As far as can be seen: it is within a collective."""
        return any("torch/distributed/" in frame for frame in self.frames[:8])

    def __str__(self) -> str:
        known = [
            frame for frame in self.frames[1:] if not frame.startswith(("torch/", "<frozen"))
        ]  # where a reader can find himself
        where = f", at {' < '.join([*self.frames[:1], *known[:4]])}" if self.frames else ""
        return f"{self.seconds:.1f} s in {self.phase}, after {self.step} optimizer steps{where}"


class Standstill:
    """Ranks none of which moves: what a signal waits for will not be finished."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._since = time.monotonic()

    def limit(self, statuses: Mapping[int, Status], size: int) -> float | None:
        """For how many seconds no rank has moved in its code, as `statuses` are now, if these are
        too many: SIGNAL_S where one is seen to wait for others, else BLIND_S. None where one of
        those that others wait for writes a checkpoint or loads the model, which may take its time.
        """
        busy = [status for status in statuses.values() if not status.waits_for_others]
        seen = {
            rank: (status.phase, status.step, status.frames) for rank, status in statuses.items()
        }
        if seen != self._seen or any(
            status.phase in ("save_checkpoint", "setup") for status in busy
        ):
            self._seen, self._since = seen, time.monotonic()
        limit = SIGNAL_S if len(busy) < size else BLIND_S
        return limit if time.monotonic() - self._since >= limit else None


@runtime_checkable
class Ongoing(Protocol):
    """A call that all ranks have been given."""

    def poll(self, wait_s: float) -> Mapping[int, Answer]:
        """The answers that are there, by rank, after waiting so long at most for one more.

        Raises WorkerDied if a rank that owes one is gone.
        """


@runtime_checkable
class Ranks(Protocol):
    """Ranks 0 … size − 1, and what can be learnt of them."""

    size: int

    def place(self, rank: int) -> Place:
        """Where a rank is."""

    def statuses(self, timeout_s: float) -> Mapping[int, Status]:
        """What the ranks that answer within this time are doing."""

    def note(self, rank: int) -> str:
        """What can be said about a rank that does not answer."""


@runtime_checkable
class RankGroup(Ranks, Protocol):
    """Ranks, each of which hosts a `TrainingRank`, with the one who drives them."""

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Ongoing:
        """Give all ranks a call. They do their calls in the order in which these were started."""

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        """Let the ranks end in order within this time (0: at once), and then end what is left of
        them and their children. May be called again.

        Those that are not ours to end are told `farewell`.
        """


def gather(
    group: RankGroup,
    call: Ongoing,
    *,
    phase: str,
    timeout_s: float,
    limit: str,
    in_background: bool = False,
) -> dict[int, Answer]:
    """The ranks' answers; not all of them where one has failed and the others go on without
    noticing.

    Raises WorkerDied, and WorkerTimeout that tells what every rank was doing; `limit` is the
    setting that says how long this may take. Once a signal has come to end the run, ranks that
    don't move have SIGNAL_S or BLIND_S, and that is told at once: the signal hides the error. Those
    that only wait for what goes on `in_background` have all the time.
    """
    left, alone, before = timeout_s, ALONE_S, time.monotonic()
    still, looked = Standstill(), before
    while True:
        try:
            answers = call.poll(min(TICK_S, max(left, 0.0)))
        except WorkerDied as error:
            raise died(group.place(error.rank), phase, error.reason) from None
        if len(answers) == group.size:
            return dict(answers)
        now = time.monotonic()
        passed, before = (
            min(now - before, 4 * TICK_S),
            now,
        )  # no more, where this process itself was stopped (Ctrl-Z, a laptop that sleeps)
        if any(answer.kind == "error" for answer in answers.values()):
            alone -= passed
            if alone <= 0:
                return dict(answers)
        elif left <= 0:
            raise hung(
                group,
                phase,
                sorted(set(range(group.size)) - set(answers)),
                f"{timeout_s:g} s ({limit})",
            )
        elif signal_came() and not in_background and now - looked >= LOOK_S:
            limit_s, looked = still.limit(group.statuses(STATUS_S), group.size), time.monotonic()
            if limit_s is not None:
                stuck = hung(
                    group,
                    phase,
                    sorted(set(range(group.size)) - set(answers)),
                    f"{limit_s:g} s after a signal, in which no rank moved",
                )
                warnings.warn(str(stuck), stacklevel=2)
                raise stuck
        left -= passed


def died(place: Place, phase: str, reason: str) -> WorkerDied:
    """The error for a rank whose process is gone."""
    message = f"rank {place.rank} (process {place.pid} on {place.host}) died in {phase}: {reason}"
    message += f"; its log is {place.log}{end_of_log(place)}" if place.log else ""
    return WorkerDied(message, rank=place.rank, host=place.host, pid=place.pid, reason=reason)


def hung(group: Ranks, phase: str, missing: list[int], within: str) -> WorkerTimeout:
    """The error for ranks that have not answered: which one the others seem to wait for, and what
    each is doing.
    """
    statuses = group.statuses(STATUS_S)
    suspects = (
        [rank for rank in missing if rank not in statuses]
        or [rank for rank in missing if not statuses[rank].waits_for_others]
        or missing
    )
    who = " and ".join(
        f"rank {rank} (process {group.place(rank).pid} on {group.place(rank).host})"
        for rank in suspects
    )
    told = [
        f"{group.place(rank)}: {statuses[rank] if rank in statuses else group.note(rank)}"
        for rank in range(group.size)
    ]
    logs = [
        f"the log of rank {rank} is {group.place(rank).log}{text}"
        for rank in suspects
        if (text := end_of_log(group.place(rank)))
    ]
    return WorkerTimeout(
        "\n  ".join(
            [
                f"{who} hung in {phase}: no answer within {within}. What every rank was doing:",
                *told,
                *logs,
            ]
        )
    )


def end_of_log(place: Place) -> str:
    """The last lines of a rank's log, if it is one that can be read here."""
    lines = last_lines(place.log) if place.log and place.here else []
    return "\n  | ".join([" and ends:", *lines]) if lines else ""


def worst(answers: Mapping[int, Answer]) -> BaseException:
    """The error to be told of several: not one that only says that another rank has gone out of a
    collective.
    """
    failed = [rank for rank, answer in sorted(answers.items()) if answer.kind == "error"]
    rank = next((rank for rank in failed if not is_consequence(answers[rank].value)), failed[0])
    return answers[rank].error or raised(answers[rank].value, rank)


def is_consequence(error: Mapping[str, str]) -> bool:
    """Whether an error (in words) is what a rank raises when another has left it alone.

    >>> is_consequence({"kind": "RuntimeError", "message": "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"})
    True
    """
    return error["kind"].startswith("Dist") or bool(
        re.search(r"gloo|NCCL|closed by peer|reset by peer|ProcessGroup", error["message"])
    )

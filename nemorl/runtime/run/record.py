"""run.json: which run this is, how far it was to go, and how it ended.

The file is written when a process begins and when it ends. One that was killed leaves `running`
behind; `status_of` sees through that.
"""

import json
import os
import platform
import secrets
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import psutil

from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.files import write_atomically

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, through all the processes that have worked on it.

    >>> RunRecord.from_dict(RunRecord(run_id="3f9a01bc", algorithm="sft").to_dict()).run_id
    '3f9a01bc'
    """

    run_id: str
    """Short and unique; made at the run's start, kept when it is resumed."""
    algorithm: str
    """Its registered name."""
    status: Status = "running"
    error: str | None = None
    """What ended a run that failed."""
    total_steps: int | None = None
    """Steps of the whole run; None before that is known."""
    sessions: tuple[float, ...] = ()
    """When each process began, in seconds since the epoch."""
    ended: float | None = None
    """When the last process ended, if it could say so."""
    pid: int = 0
    host: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunRecord":
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, "sessions": tuple(values.get("sessions", ()))})


def begin_record(directory: RunDirectory, *, algorithm: str) -> RunRecord:
    """The record of a run that this process begins or, where the folder holds results already, goes
    on with.
    """
    previous = read_record(directory) if directory.holds_results() else None
    record = previous or RunRecord(run_id=secrets.token_hex(4), algorithm=algorithm)
    sessions = (*record.sessions, round(time.time(), 3))
    record = replace(
        record,
        algorithm=algorithm,
        status="running",
        error=None,
        ended=None,
        sessions=sessions,
        pid=os.getpid(),
        host=platform.node(),
    )
    write_record(directory, record)
    return record


def write_record(directory: RunDirectory, record: RunRecord) -> None:
    """run.json, replaced at once."""
    write_atomically(
        directory.record, json.dumps(record.to_dict(), indent=1, ensure_ascii=False) + "\n"
    )


def read_record(directory: RunDirectory) -> RunRecord | None:
    """The record of a run; None where there is none, or none that can be read: a report can do
    without.
    """
    try:
        return RunRecord.from_dict(json.loads(directory.record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def status_of(record: RunRecord) -> Status:
    """How a run stands: one whose process is gone without a word was interrupted.

    Of a process on another computer nothing is known but its word.
    """
    if record.status != "running" or record.host != platform.node():
        return record.status
    try:
        began = psutil.Process(record.pid).create_time()
    except psutil.Error:
        return "interrupted"
    return (
        "running" if began <= record.sessions[-1] + 1 else "interrupted"
    )  # a later process may have the number of ours

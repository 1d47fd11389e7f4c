"""run.json: which run this is, and its status."""

import json
import os
import platform
import secrets
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import psutil

from nemorl.checks import require
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.files import write_atomically
from nemorl.warn import warn

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, through all processes that worked on it."""

    run_id: str
    """Short and unique, kept when the run is resumed."""
    algorithm: str
    """Its registered name, or `script_with` a config."""
    script: str = ""
    """Name of the file that began it, if there is one."""
    status: Status = "running"
    error: str | None = None
    """The error of a run that failed."""
    total_steps: int | None = None
    """Steps of the whole run, once known."""
    sessions: tuple[float, ...] = ()
    """Start of each process, in seconds since the epoch."""
    ended: float | None = None
    """End of the last process, unless it was killed."""
    pid: int = 0
    host: str = ""

    @classmethod
    def begin(
        cls, directory: RunDirectory, *, algorithm: str, previous: "RunRecord | None" = None
    ) -> "RunRecord":
        """Write and return the record of a run that this process begins or goes on with."""
        new = cls(run_id=secrets.token_hex(4), algorithm=algorithm, script=script_name())
        record = previous or new
        record = replace(
            record,
            status="running",
            error=None,
            ended=None,
            sessions=(*record.sessions, round(time.time(), 3)),
            pid=os.getpid(),
            host=platform.node(),
        )
        record.write(directory)
        return record

    @classmethod
    def read(cls, directory: RunDirectory) -> "RunRecord | None":
        """Return the record of a run, if there is one; one that can't be read is warned of."""
        if not directory.record.exists():
            return None
        try:
            values = {**json.loads(directory.record.read_text(encoding="utf-8"))}
            known = {field.name: values[field.name] for field in fields(cls)}
            return cls(**{**known, "sessions": tuple(values["sessions"])})
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            warn(f"{directory.record} is not the record of a run, and is omitted")
            return None

    def write(self, directory: RunDirectory) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_atomically(directory.record, text + "\n", "the status of the run")

    @property
    def present_status(self) -> Status:
        """The run's status, "interrupted" if it was killed on this machine."""
        if self.status != "running" or self.host != platform.node():
            return self.status
        try:
            began = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return "interrupted"
        # A later process may have the same number.
        return "running" if began <= max(self.sessions, default=0) + 1 else "interrupted"


def script_with(config: type) -> str:
    """Return what stands for an algorithm's name where a script has a training loop of its own.

    >>> script_with(int)
    'a script with int'
    """
    return f"a script with {config.__name__}"


def script_name() -> str:
    """Return the script's name, "" in a notebook."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").name


def check_algorithm(directory: RunDirectory, *expected: str) -> None:
    """Raise ValueError where the run in a directory is of none of the `expected` algorithms, and
    warn where another script goes on with it.
    """
    record = RunRecord.read(directory)
    found = expected[0] if record is None else record.algorithm
    command = f"nemorl {found} --run.dir {directory.path} --run.resume resumes it"
    require(
        found in expected,
        "run.dir",
        f"must be the folder of a run of {' or '.join(expected)}",
        f"one of {found}",
        "resume it with that script" if found.startswith("a script ") else command,
    )
    here = script_name()
    if record and found.startswith("a script ") and record.script not in ("", here) and here:
        warn(f"{here} resumes a run of {record.script}: its loop must take the same steps")

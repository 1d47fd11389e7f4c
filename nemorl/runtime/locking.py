"""One process at a time in a run's directory, and a run that is told to end ends in order."""

import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LOCK_NAME = ".lock"


class Terminated(SystemExit):
    """SIGTERM, as an exception."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def locked(directory: Path | str) -> Iterator[None]:
    """Hold the folder for this process; it is made if it isn't there.

    The lock is one of the operating system on the file `.lock`, so that it ends with its process however that ends; the file says who holds it.
    Raises ValueError if another process (or another run of this one) has the folder, or if it can't be written to.
    """
    path = Path(directory) / LOCK_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise ValueError(
            f"run.dir must be a folder that can be written to, but {path.parent} can't ({error}): name another one (--run.dir)"
        ) from error
    if descriptor is None:
        raise ValueError(
            f"run.dir must be used by one run at a time, but {path.parent} is in use by {_holder(path)}: wait for it or name another one (--run.dir)"
        )
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within it, SIGTERM (a scheduler's notice) raises `Terminated`, so that the last step is saved. Somebody else's handler stays in force.

    Only in the main thread; in others nothing is changed.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: the next would come while the checkpoint is written
        raise Terminated

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _acquire(path: Path) -> int | None:
    """The open and locked file; None if somebody else has it."""
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # its holder has just removed it


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"

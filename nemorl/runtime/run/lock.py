"""One run at a time in a run's directory."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_NAME = ".lock"


@contextmanager
def locked(directory: Path | str) -> Iterator[None]:
    """Hold the directory for this run while the block lasts, and create it where it is missing.

    The operating system frees the lock when the process ends, however it ends.

    Raises:
        ValueError: another run holds the directory, or it cannot be written to.
    """
    path = Path(directory) / LOCK_NAME
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}")
    except Timeout as error:
        holder = path.read_text(errors="replace") or "another process"
        raise ValueError(
            f"run.dir must be used by one run at a time, but {path.parent} is in use by {holder}:"
            " wait for it or name another one (--run.dir)"
        ) from error
    except OSError as error:
        lock.release()
        raise ValueError(
            f"run.dir must be a folder that can be written to, but {path.parent} can't ({error}):"
            " name another one (--run.dir)"
        ) from error
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child that leaves the block
            path.unlink(missing_ok=True)
            lock.release()

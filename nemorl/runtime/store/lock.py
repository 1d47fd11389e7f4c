"""One run at a time in a run's directory."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nemorl.checks import require
from nemorl.runtime.store.directory import writing_below
from nemorl.runtime.store.files import HOLDERS

LOCK_NAME = ".lock"


@contextmanager
def locked(directory: Path | str) -> Iterator[None]:
    """Create the directory if it is missing and hold it for this run while the block lasts.

    The operating system frees the lock when the process ends, however it ends. A fork of the
    process may not write there: see `check_writer`.

    Raises:
        ValueError: another run holds the directory, it cannot be written to, or its lock is a
            symbolic link, through which a run would overwrite another file.
    """
    path = Path(directory) / LOCK_NAME
    link = path.is_symlink()
    require(not link, "run.dir", "must hold no symbolic link as its lock", str(path), "remove it")
    lock = FileLock(path)
    with writing_below(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            holder = path.read_text(errors="replace") or "another process"
            raise ValueError(
                f"run.dir must be used by one run at a time, but {path.parent} is in use by"
                f" {holder}: wait for it or name another one (--run.dir)"
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"process {os.getpid()} on {platform.node()} since {since}"
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    owner, folder = os.getpid(), os.path.abspath(path.parent)  # noqa: PTH100
    HOLDERS[folder] = owner
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child that leaves the block
            del HOLDERS[folder]
            path.unlink(missing_ok=True)
            lock.release()

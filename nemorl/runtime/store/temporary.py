"""Folders in the temporary folder that the next start removes if a kill has left them."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = ".nemorl"
"""A file by which a folder is ours, locked as long as a process has it open."""
OURS = "nemorl-*"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the block, which a later call removes after a kill."""
    sweep_temporary()
    folder = Path(tempfile.mkdtemp(prefix=OURS.rstrip("*")))
    owner = claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def claim(folder: Path) -> int:
    """Mark a folder for removal once no process has the returned descriptor open."""
    hidden = folder / f"{MARK}-{os.getpid()}"
    owner = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # of file systems without locks
        fcntl.flock(owner, fcntl.LOCK_EX)
        hidden.rename(folder / MARK)  # nobody sees it unlocked
    return owner


def sweep_temporary() -> None:
    """Remove this user's folders whose owners are dead."""
    for parent in {tempfile.gettempdir(), os.environ.get("RAY_TMPDIR") or "/tmp"}:
        for mark in Path(parent).glob(f"{OURS}/{MARK}"):
            with suppress(OSError):
                _remove_if_dead(mark)


def _remove_if_dead(mark: Path) -> None:
    descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        users = {os.fstat(descriptor).st_uid, mark.parent.lstat().st_uid}
        if users == {os.geteuid()} and not mark.parent.is_symlink():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in [*os.scandir(mark.parent)]:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry)
                elif entry.name != MARK:
                    Path(entry).unlink()
            mark.unlink()  # last, so that a later call removes what could not be, or came meanwhile
            mark.parent.rmdir()
    finally:
        os.close(descriptor)

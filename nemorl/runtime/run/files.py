"""Small operations on files, each on the disk when it returns."""

import os
import shutil
from pathlib import Path


def flush(path: Path) -> None:
    """Have a file's contents, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: str, target: str) -> None:
    """The same file under another name; a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        flush(Path(target))


def replace_text(path: Path, text: str) -> None:
    """A new file in the place of a link, so that the file that was linked stays as it is."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    flush(path)


def lives(pid: str) -> bool:
    """Whether another process has this number.

    Our own counts as dead: at a start it is a number used again (containers count from 1).
    """
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

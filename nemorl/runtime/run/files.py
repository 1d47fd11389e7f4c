"""Files that survive a crash: on the disk when these functions return."""

import os
from pathlib import Path

TEMPORARY = ".tmp-"
"""Begins the name of a file or folder that is not complete."""


def flush(path: Path) -> None:
    """Have a file's contents, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's contents so that a reader sees the old or the new ones, never a mixture."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

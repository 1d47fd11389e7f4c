"""Files that survive a crash: on the disk when these functions return."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-"
"""Begins the name of a file or folder that is not complete."""
HOLDERS: dict[str, int] = {}
"""The process that holds the lock of a run's folder, by the folder: a fork of it has them, too."""


def check_writer(path: Path) -> None:
    """End this process if it is a fork of the one that holds the run: two would tear its files."""
    place = os.path.abspath(path)  # noqa: PTH100, as links stay
    for folder, holder in list(HOLDERS.items()):
        if holder != os.getpid() and f"{place}/".startswith(f"{folder}/"):
            text = (
                f"process {os.getpid()} ends: it is a fork of process {holder}, whose run writes"
                f" {folder}, and came back from a reward, a loss or a callback: end forked children"
                " with os._exit\n"
            )
            os.write(2, text.encode(errors="backslashreplace"))
            os._exit(1)


class NotWritten(OSError):
    """Something that could not be written: what, where, why, and what to do."""


@contextmanager
def writing(what: str, path: Path | str) -> Iterator[None]:
    """Raise NotWritten, with what and where, for an error of the system in the block."""
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise classes of their own. An error without a number is ours, and a
        # missing file, which was to be read, is named.
        of_system = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, FileNotFoundError) or not (of_system or "(os error " in str(error)):
            raise
        raise NotWritten(
            f"{what} could not be written to {path} ({error}{free_space(path)}): make room or give"
            " write access there, or name another place"
        ) from error


def free_space(path: Path | str) -> str:
    """Return the room for a file, as the end of a sentence.

    >>> free_space("missing/file")
    ''
    """
    with suppress(OSError):
        return f"; {shutil.disk_usage(Path(path).parent).free / 1e9:.2f} GB are free there"
    return ""


def flush(path: Path) -> None:
    """Sync a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str, what: str | None = None) -> None:
    """Replace a file's contents so that a reader sees the old or the new ones, never a mixture.

    what: they are, for errors; None for the file's name. Raises NotWritten.
    """
    check_writer(path)
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with writing(what or path.name, path):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            flush(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

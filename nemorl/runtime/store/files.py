"""Files on the disk, temporary folders, and errors of workers, with their logs."""

import builtins
import fcntl
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from nemorl.rollout.calls import end_fork

TEMPORARY = ".tmp-"
"""Begins the name of what is not complete."""


def check_writer(path: Path) -> None:
    """End this process if it is a fork of the one that holds the run."""
    end_fork(os.path.abspath(path))  # noqa: PTH100, as links stay


class NotWritten(OSError):
    """What could not be written, where, and why."""


@contextmanager
def writing(what: str, path: Path | str) -> Iterator[None]:
    """Raise NotWritten for an error of the system in the block."""
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise their own classes. An error without a number is ours; a missing
        # file was to be read.
        of_system = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, FileNotFoundError) or not (of_system or "(os error " in str(error)):
            raise
        raise NotWritten(
            f"{what} could not be written to {path} ({error}{free_space(path)}): make room or give"
            " write access there, or name another place"
        ) from error


def free_space(path: Path | str) -> str:
    """Return the room for a file, as the end of a sentence."""
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

    what: its name in errors. Raises NotWritten.
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


MARK = ".nemorl"
"""A file that marks a folder as ours, locked while a process has it open."""
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
            mark.unlink()  # last, so that a later call removes the rest
            mark.parent.rmdir()
    finally:
        os.close(descriptor)


class ReceiptError(RuntimeError):
    """Raised where a receipt does not hold."""


class WorkerError(RuntimeError):
    """A worker's exception of a class that is not built in."""


class WorkerDied(ChildProcessError):
    """A worker's process is gone."""


class WorkerTimeout(TimeoutError):
    """A worker has not answered in time."""


class FailedAlone(RuntimeError):
    """A rank raised while the others wait for it."""


def memory_advice(error: BaseException) -> str | None:
    """Return advice for a failed allocation."""
    failed = re.search("out of memory|can't allocate memory", str(error))
    if not (failed and isinstance(error, RuntimeError)):
        return None
    return (
        "To take less memory: fewer tokens at a time (--trainer.micro-batch-tokens), recomputed"
        " activations (--parallel.activation-checkpointing full), more devices"
        " (--parallel.dp-shard; with megatron --parallel.tp or --parallel.pp), or, with dtensor,"
        " adapters (--lora.rank 16); nemorl plan shows what fits."
    )


def in_words(error: BaseException) -> dict[str, str]:
    """Return an exception for another process."""
    builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    words = {"kind": type(error).__name__, "builtin": builtin, "message": str(error)}
    return words | {"traceback": "".join(traceback.format_exception(error))}


def raised(error: Mapping[str, str], rank: int) -> Exception:
    """Return a worker's exception, its traceback as a note."""
    kind = getattr(builtins, error["builtin"], Exception)
    found: Exception = WorkerError(f"{error['kind']}: {error['message']}")
    if kind not in (Exception, BaseException, SystemExit, KeyboardInterrupt, GeneratorExit):
        with suppress(TypeError):  # some can't be made of a message
            found = kind(error["message"])
    found.add_note(f"in worker {rank}:\n{error['traceback']}")
    return found


def with_log(text: str, log: Path | None) -> str:
    """Return a text with a log's last lines, if any."""
    lines = list[str]()
    if log is not None:
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            lines = file.read().decode(errors="replace").splitlines()[-10:]
    return "\n  | ".join([f"{text}; its log ends:", *lines] if lines else [text])


def reason_of(told: str) -> str:
    """Return Ray's account of a death, in a line."""
    if "running low on memory" in told:
        return "Ray killed it, because memory was short on its machine"
    if "connection error code" in told:
        return "it was killed (by the kernel, if memory was short) or it crashed"
    if "ray.kill" in told:
        return "it was ended by us"
    if "unavailable" in told:
        return "it doesn't answer any more, or its node doesn't"
    return (told.strip().splitlines() or ["for a reason unknown"])[-1].strip()

"""One process at a time in a run's directory, and a run that is told to end ends in order."""

import contextlib
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LOCK_NAME = ".lock"
_HELD: set[int] = set()
"""Descriptors of the locks that this process holds."""


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
    _HELD.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        yield
    finally:
        if descriptor in _HELD:  # not so in a forked child that comes by here
            _HELD.discard(descriptor)
            path.unlink(missing_ok=True)
            os.close(descriptor)


@dataclass
class _Deferral:
    """Whether signals wait at present, and the one that does."""

    active: bool = False
    update_begun: Callable[[], bool] = bool
    pending: int | None = None


_DEFERRAL = _Deferral()


@contextmanager
def signals_in_order() -> Iterator[None]:
    """Within it, SIGTERM (a scheduler's notice) raises `Terminated`, so that the last step is saved, and both it and Ctrl-C respect `deferred`.

    Somebody else's handlers stay in force. Only in the main thread; in others nothing is changed.
    """
    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    replaced = {number: before for number, before in ours.items() if _in_main_thread() and signal.getsignal(number) is before}
    for number in replaced:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


@contextmanager
def deferred(update_begun: Callable[[], bool]) -> Iterator[None]:
    """A block that a signal doesn't part, such as a step and the record of it: the signal raises when the block is over.

    SIGTERM has a deadline: it waits only if `update_begun()`, since until then the step before is there to be saved. A second signal raises at once.
    """
    if not _in_main_thread():  # signals don't come here
        yield
        return
    _DEFERRAL.update_begun, _DEFERRAL.pending, _DEFERRAL.active = update_begun, None, True
    try:
        yield
    except BaseException:
        _DEFERRAL.active, _DEFERRAL.pending = False, None  # the run ends by this error
        raise
    _DEFERRAL.active = False
    _raise_pending()


@contextmanager
def interruptible() -> Iterator[None]:
    """A part of a `deferred` block (or of none) that can be left at any point: signals raise at once, first of all the one that waits."""
    if not _in_main_thread():
        yield
        return
    before = _DEFERRAL.active
    try:
        _DEFERRAL.active = False
        _raise_pending()
        yield
    finally:
        _DEFERRAL.active = before


def _handle(number: int, frame: FrameType | None) -> None:
    wait = _DEFERRAL.active and _DEFERRAL.pending is None and (number == signal.SIGINT or _DEFERRAL.update_begun())
    _DEFERRAL.pending = number
    if not wait:
        _raise_pending()
    with contextlib.suppress(OSError):  # not print: the handler may have come in the midst of one
        os.write(2, b"\nthe run ends once this step is finished; a second signal (Ctrl-C) ends it at once, and the step is lost\n")


def _raise_pending() -> None:
    number, _DEFERRAL.pending = _DEFERRAL.pending, None
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the next would come while the checkpoint is written
        raise Terminated
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _after_fork() -> None:
    """A forked child holds no lock beyond the life of its parent, and is no run whose steps are worth waiting for."""
    for descriptor in _HELD:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD.clear()
    _DEFERRAL.active, _DEFERRAL.pending = False, None


os.register_at_fork(after_in_child=_after_fork)


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

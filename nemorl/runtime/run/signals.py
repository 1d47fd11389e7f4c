"""One process at a time in a run's directory, and a run that is told to end ends in order."""

import contextlib
import json
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout

LOCK_NAME = ".lock"
_HELD: set[int] = set()
"""Descriptors of the locks that this process holds."""
_EARS: set[int] = set()
"""Descriptors to which Python writes the numbers of signals."""
_BEHIND_SIGTERM: list[Callable[[], Exception | None]] = []
"""Who knows what else may be behind a SIGTERM."""


class Terminated(SystemExit):
    """SIGTERM, as an exception."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def locked(directory: Path | str) -> Iterator[None]:
    """Hold the folder for this process; it is made if it isn't there.

    The lock is one of the operating system on the file `.lock`, so that it ends with its process
    however that ends; the file says who holds it. Raises ValueError if another process (or another
    run of this one) has the folder, or if it can't be written to.
    """
    path = Path(directory) / LOCK_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise ValueError(
            f"run.dir must be a folder that can be written to, but {path.parent} can't ({error}):"
            " name another one (--run.dir)"
        ) from error
    if descriptor is None:
        raise ValueError(
            f"run.dir must be used by one run at a time, but {path.parent} is in use by"
            f" {_holder(path)}: wait for it or name another one (--run.dir)"
        )
    _HELD.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(
            descriptor,
            json.dumps(
                {
                    "pid": os.getpid(),
                    "host": platform.node(),
                    "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                }
            ).encode(),
        )
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
    came: bool = False
    """Whether a signal has come since the run began."""


_DEFERRAL = _Deferral()


@contextmanager
def signals_in_order() -> Iterator[None]:
    """Within it, SIGTERM (a scheduler's notice) raises `Terminated`, so that the last step is
    saved, and both it and Ctrl-C respect `deferred`.

    Somebody else's handlers stay in force. Only in the main thread; in others nothing is changed.
    """
    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    replaced = {
        number: before
        for number, before in ours.items()
        if _in_main_thread() and signal.getsignal(number) is before
    }
    for number in replaced:
        signal.signal(number, _handle)
    _DEFERRAL.came = False
    try:
        yield
    finally:
        _DEFERRAL.came = False
        for number, before in replaced.items():
            signal.signal(number, before)


@contextmanager
def deferred(update_begun: Callable[[], bool]) -> Iterator[None]:
    """A block that a signal doesn't part, such as a step and the record of it: the signal raises
    when the block is over.

    SIGTERM has a deadline: it waits only if `update_begun()`, since until then the step before is
    there to be saved. A second signal raises at once. So does one that waits where ranks turn out
    to be dead or stuck: the step that it waits for will not come.
    """
    if not _in_main_thread():  # signals don't come here
        yield
        return
    _DEFERRAL.update_begun, _DEFERRAL.pending, _DEFERRAL.active = update_begun, None, True
    try:
        yield
    except BaseException as error:
        _DEFERRAL.active = False
        if _DEFERRAL.pending is not None and isinstance(error, WorkerDied | WorkerTimeout):
            if isinstance(error, WorkerDied):  # `group.gather` has told of the others
                warnings.warn(str(error), stacklevel=2)
            _raise_pending(error)
        _DEFERRAL.pending = None  # the run ends by this error
        raise
    _DEFERRAL.active = False
    _raise_pending()


@contextmanager
def interruptible() -> Iterator[None]:
    """A part of a `deferred` block (or of none) that can be left at any point: signals raise at
    once, first of all the one that waits.
    """
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


def explain_sigterm(find: Callable[[], Exception | None] | None) -> None:
    """Have SIGTERM raise the error that `find` returns, if there is one, instead of `Terminated`:
    torchrun sends it where a rank has died.

    With None it is `Terminated` again.
    """
    _BEHIND_SIGTERM[:] = [] if find is None else [find]


def signal_came() -> bool:
    """Whether a signal ends this run, be it now or when the present step is finished."""
    return _DEFERRAL.came


class SignalEar:
    """Hears of SIGINT and SIGTERM as they come, also while the main thread is in a call into which
    no Python handler gets.

    Not of one for which somebody else has a handler when this is made: what it means is for that to
    say. Made in another thread than the main one, or beside another (Python has room for one), it
    is deaf.
    """

    def __init__(self) -> None:
        self.number = 0
        ours = (signal.SIG_DFL, signal.default_int_handler, _handle)
        self._numbers = [
            number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) in ours
        ]
        self._ends: tuple[int, int] | None = None
        if not _in_main_thread():
            return
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before == -1:
            self._ends = reader, writer
            _EARS.add(writer)
        else:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            os.close(reader)
            os.close(writer)

    def heard(self) -> bool:
        """Whether one has come since this was made; `number` is that of the last one."""
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):
                came = [
                    number for number in os.read(self._ends[0], 4096) if number in self._numbers
                ]
                self.number = came[-1] if came else self.number
        return self.number != 0

    def close(self) -> None:
        """Give back what it hears with; nothing in another thread than the main one, as Python
        would go on to write there.
        """
        if self._ends is None or not _in_main_thread():
            return
        ends, self._ends = self._ends, None
        signal.set_wakeup_fd(-1)
        _EARS.discard(ends[1])
        for end in ends:
            os.close(end)


def _handle(number: int, frame: FrameType | None) -> None:
    behind = (
        next((error for find in _BEHIND_SIGTERM if (error := find()) is not None), None)
        if number == signal.SIGTERM
        else None
    )
    if behind is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise behind
    wait = (
        _DEFERRAL.active
        and _DEFERRAL.pending is None
        and (number == signal.SIGINT or _DEFERRAL.update_begun())
    )
    _DEFERRAL.pending, _DEFERRAL.came = number, True
    if not wait:
        _raise_pending()
    with contextlib.suppress(OSError):  # not print: the handler may have come in the midst of one
        os.write(
            2,
            b"\nthe run ends once this step is finished; a second signal (Ctrl-C) ends it at once,"
            b" and the step is lost\n",
        )


def _raise_pending(cause: BaseException | None = None) -> None:
    number, _DEFERRAL.pending = _DEFERRAL.pending, None
    if number == signal.SIGTERM:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # the next would come while the checkpoint is written
        raise Terminated from cause
    if number == signal.SIGINT:
        raise KeyboardInterrupt from cause


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _after_fork() -> None:
    """A forked child holds no lock beyond the life of its parent, and is no run whose steps are
    worth waiting for.
    """
    for descriptor in _HELD:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD.clear()
    _DEFERRAL.active, _DEFERRAL.pending, _DEFERRAL.came = False, None, False
    if _EARS:  # whose pipe is the parent's, too
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


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

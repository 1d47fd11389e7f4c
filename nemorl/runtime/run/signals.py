"""SIGTERM and Ctrl-C end a run by an exception; while the weights change, after the step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from nemorl.runtime.store.errors import WorkerDied, WorkerTimeout
from nemorl.warn import warn


class Terminated(SystemExit):
    """SIGTERM, as an exception."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@dataclass
class _State:
    waits: Callable[[], bool] = bool
    """Whether a signal waits now; `bool()` is False."""
    pending: int | None = None


_STATE = _State()


@contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the block, and both it and Ctrl-C wait for
    `update_in_progress`, where no one else handles them.
    """
    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    replaced = {
        number: before
        for number, before in ours.items()
        if _in_main_thread() and signal.getsignal(number) is before
    }
    for number in replaced:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


@contextmanager
def update_in_progress(begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Have a signal that comes after `begun()` wait for the end of the block, and raise there; a
    second one raises at once. Of nested blocks the outer one counts.
    """
    nested = _STATE.waits is not bool
    if nested or not _in_main_thread():  # signals do not arrive in other threads
        yield
        return
    _STATE.waits = begun
    try:
        yield
    except (WorkerDied, WorkerTimeout) as error:  # or the run would begin again with new ranks
        if (number := _leave()) is not None:
            warn(str(error))
            _raise(number, error)
        raise
    finally:
        number = _leave()
    if number is not None:
        _raise(number)


def _leave() -> int | None:
    """Let signals raise again, and return one that waits."""
    number, _STATE.pending, _STATE.waits = _STATE.pending, None, bool
    return number


def _handle(number: int, frame: FrameType | None) -> None:
    if _STATE.pending is not None or not _STATE.waits():
        _leave()
        _raise(number)
    _STATE.pending = number
    with contextlib.suppress(OSError):  # os.write, as this may interrupt a print
        os.write(2, b"\nthe run ends after this step; a second signal (Ctrl-C) ends it at once, "
                    b"and the step is lost\n")  # fmt: skip


def _raise(number: int, cause: BaseException | None = None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt from cause
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another would interrupt the last checkpoint
    raise Terminated from cause


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


os.register_at_fork(after_in_child=_leave)  # a forked child has no step to finish

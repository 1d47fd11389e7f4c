"""What torchrun's heartbeats know about signals."""

import contextlib
import os
import signal

from nemorl.runtime.run import signals

_EARS: set[int] = set()
"""Descriptors to which Python writes the numbers of signals."""


def signal_came() -> bool:
    """Whether a signal waits for the end of an update."""
    return signals._STATE.pending is not None


class SignalEar:
    """Hears of SIGINT and SIGTERM as they come, also while the main thread is in a call into which
    no Python handler gets.

    Not of one for which somebody else has a handler when this is made: what it means is for that to
    say. Made in another thread than the main one, or beside another (Python has room for one), it
    is deaf.
    """

    def __init__(self) -> None:
        self.number = 0
        ours = (signal.SIG_DFL, signal.default_int_handler, signals._handle)
        self._numbers = [
            number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) in ours
        ]
        self._ends: tuple[int, int] | None = None
        if not signals._in_main_thread():
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
        if self._ends is None or not signals._in_main_thread():
            return
        ends, self._ends = self._ends, None
        signal.set_wakeup_fd(-1)
        _EARS.discard(ends[1])
        for end in ends:
            os.close(end)


def _after_fork() -> None:
    if _EARS:  # whose pipe is the parent's, too
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)

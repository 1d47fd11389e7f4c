"""Settings of the whole process that several may need at a time."""

from collections.abc import Callable
from threading import Lock


class Overlapping:
    """A block, for `with`: of several, the first changes a setting, the last restores it."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        """change: changes the setting, and returns what restores it."""
        self.change, self.__doc__ = change, change.__doc__
        self._inside, self._lock = 0, Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._restore = self.change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

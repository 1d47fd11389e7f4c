"""When an engine took which requests: recorded by passes, and repeated.

A pass of an engine computes a token of all responses in flight, so the last bits of a response
depend on which ones shared its passes. Its own passes are the clock: a request that came before
pass 120 comes before pass 120 again, and an engine that slept after pass 300 does so again.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from nemorl.checks import short
from nemorl.rollout.scheduler import Request

STUCK_S = 300.0
"""Seconds after which a request that does not come ends a replay."""


@dataclass(frozen=True)
class Taken:
    """The engine took requests, by their seeds, before the pass of this number."""

    passes: int
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Slept:
    """The engine fell asleep before the pass of this number."""

    passes: int


Moment = Taken | Slept


class Schedule:
    """Counts the passes of an engine; with `records` it keeps when requests came."""

    def __init__(self, *, records: bool = False) -> None:
        self.passes = 0
        """Passes so far."""
        self.records = records
        self.moments: list[Moment] = []
        """Recorded, and not yet written anywhere."""

    def arrived(self, requests: list[Request]) -> list[Request]:
        """Return the requests that the engine takes now, of those that came."""
        if self.records and requests:
            self.moments.append(Taken(self.passes, tuple(map(seed_of, requests))))
        return requests

    def due(self) -> list[Request] | None:
        """Return further requests to take before the next pass; None: the pass must wait."""
        return []

    def wait(self) -> None:
        """Wait until the engine may fall asleep."""

    def slept(self) -> None:
        """Note that the engine falls asleep."""
        if self.records:
            self.moments.append(Slept(self.passes))


class Replay(Schedule):
    """Makes an engine take requests, and sleep, when another did.

    Raises: RuntimeError where requests come that the other did not have.
    """

    def __init__(self, moments: Iterable[Moment]) -> None:
        super().__init__(records=True)
        self._ahead = deque(moments)
        self._came: defaultdict[int, deque[Request]] = defaultdict(deque)
        self._since: tuple[float, tuple[int, int]] | None = None
        """Since when nothing has happened, and what had happened by then."""

    def arrived(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self._came[seed_of(request)].append(request)
        return [] if self._ahead else super().arrived(self._left())

    def due(self) -> list[Request] | None:
        moment = self._next
        if moment is None or moment.passes > self.passes:
            return []
        if isinstance(moment, Slept) or not all(map(self._waits, moment.seeds)):
            self._check()
            return None
        self._ahead.popleft()
        return super().arrived([self._came[seed].popleft() for seed in moment.seeds])

    def wait(self) -> None:
        while self._next not in (None, Slept(self.passes)):
            time.sleep(0.001)
            self._check()

    def slept(self) -> None:
        if self._ahead:
            self._ahead.popleft()
        self._since = None
        super().slept()

    def _check(self) -> None:
        """Raise RuntimeError where nothing has happened for STUCK_S."""
        now, seen = time.monotonic(), (self.passes, len(self._ahead))
        if self._since is None or self._since[1] != seen:
            self._since = now, seen
        elif now - self._since[0] > STUCK_S:
            raise RuntimeError(
                f"the run must repeat async.replay, but after pass {self.passes} of the engine"
                f" {short(self._next)} did not come: replay it with the same code, model and data"
            )

    def _waits(self, seed: int) -> bool:
        """Return whether a request of this seed waits; ones that were given up are forgotten."""
        came = self._came[seed]
        while came and came[0].future.done():
            came.popleft()
        return bool(came)

    @property
    def _next(self) -> Moment | None:
        try:
            return self._ahead[0]
        except IndexError:  # another thread has taken the last one
            return None

    def _left(self) -> list[Request]:
        """Return what came and was not taken."""
        found = [request for each in self._came.values() for request in each]
        self._came.clear()
        return found


def seed_of(request: Request) -> int:
    """Return the key that identifies a request."""
    return request.params.seed or 0

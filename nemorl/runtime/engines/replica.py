"""One engine in a process of its own, as the driver sees it: started in the background, used,
ended, and started again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from nemorl.runtime.cluster.workers import Pending, RayWorkerGroup, WorkerTimeout
from nemorl.runtime.engines.spec import EngineSpec
from nemorl.runtime.engines.worker import Progress


class Life:
    """A replica's process, from its start to its end: what the weights' sender knows as a receiver."""

    def __init__(self, group: RayWorkerGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def start(self, method: str, *args: Any) -> Pending:
        return self.group.call(self.rank, method, *args)


class Replica:
    """One of the engines, through all its lives."""

    def __init__(self, group: RayWorkerGroup, rank: int) -> None:
        self.group, self.rank = group, rank
        self.life: Life | None = None
        """None: its engine is not up."""
        self.starting: Future[None] | None = None
        self.began = 0.0
        self.version: int | None = None
        """Of its weights. None: it has none, or not all."""
        self.deaths = 0
        """In a row, without a finished prompt."""
        self.given_up = False
        """It is not started again."""
        self.seen, self.progress = 0.0, Progress()
        self._fresh = True
        self._tokens, self._busy_s, self._restarts = 0, 0.0, 0

    def begin(self, spec: EngineSpec, timeout_s: float) -> None:
        """Start the engine in the background; `joined` makes it known.

        After a death in a fresh process.
        """
        started: Future[None] = Future()
        again, self._fresh, self.starting, self.began = (
            not self._fresh,
            False,
            started,
            time.monotonic(),
        )

        def start() -> None:
            try:
                if again:
                    self.group.restart(self.rank)
                started.set_result(
                    self.group.call(self.rank, "start", spec).result(timeout_s=timeout_s)
                )
            except WorkerTimeout as error:
                started.set_exception(WorkerTimeout(f"{error} (generation.start_timeout_s)"))
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=start, name=f"start-replica-{self.rank}", daemon=True).start()

    def joined(self) -> None:
        """Its engine is up. Raises what the start raised."""
        assert self.starting is not None
        started, self.starting = self.starting, None
        started.result()
        self.life, self.progress = Life(self.group, self.rank), Progress()

    def ended(self) -> None:
        """Its process is gone, or good for nothing more."""
        self.group.kill(self.rank)
        self.life = self.starting = self.version = None
        self.deaths, self._restarts = self.deaths + 1, self._restarts + 1

    def advanced(self, progress: Progress) -> None:
        """It has answered; it counts as alive if it has also done something."""
        if progress.finished or progress.num_tokens != self.progress.num_tokens:
            self.seen = time.monotonic()
        if progress.finished:
            self.deaths = 0
        self._tokens += max(0, progress.num_tokens - self.progress.num_tokens)
        self._busy_s += max(0.0, progress.busy_s - self.progress.busy_s)
        self.progress = progress

    def measured(self) -> tuple[int, float, int]:
        """Tokens, seconds of computing, and restarts, since this was last asked."""
        found = self._tokens, self._busy_s, self._restarts
        self._tokens, self._busy_s, self._restarts = 0, 0.0, 0
        return found

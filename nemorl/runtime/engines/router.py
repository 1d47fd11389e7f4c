"""An event loop on a thread of its own, which owns the state of the routing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from nemorl.runtime.engines.routing import Action, Event, Routing, decide

TICK_S = 0.5
"""How often a thread that waits looks whether Ray is there, and for replicas without weights."""

T = TypeVar("T")


class Router:
    """Notes events and has the actions executed, on its event loop.

    Args:
        act: executes an action, on the event loop; it may raise nothing.
        check: raises where Ray is gone, so that a thread would wait forever.
    """

    def __init__(
        self, state: Routing, act: Callable[[Action], None], check: Callable[[], None]
    ) -> None:
        self.state = state
        """May be read by any thread."""
        self.check = check
        self._act, self._changed = act, asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="router", daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        """Note an event, on the event loop."""
        self.state, actions = decide(self.state, event)
        for action in actions:
            self._act(action)
        self._changed.set()

    async def until(self, condition: Callable[[Routing], bool]) -> None:
        """Wait for a state, on the event loop."""
        while not condition(self.state):
            self._changed.clear()
            await self._changed.wait()

    def send(self, event: Event) -> None:
        """Note an event, from another thread."""

        async def noted() -> None:
            self.note(event)

        self.do(noted())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine on the event loop, for another thread.

        Raises: ClusterLost.
        """
        try:
            job = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the event loop is closed
            work.close()
            raise
        try:
            while not wait([job], TICK_S).done:
                self.check()
                if self.loop.is_closed():
                    raise RuntimeError("the engines were shut down meanwhile")
            return job.result()
        except BaseException:
            job.cancel()
            raise

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

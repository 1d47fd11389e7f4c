"""Which replica answers which request: a function of a frozen state and an event.

`decide` starts no process, reads no clock and sends no weights: the `RequestRouter` feeds it
events, and `replicas` executes its actions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

TICK_S = 0.5
"""Between two looks, while a thread waits, at Ray and for replicas without weights."""
T = TypeVar("T")


class ProcessId(NamedTuple):
    """A process of the replica `rank`, of which `start` came before."""

    rank: int
    start: int


class RoutedRequest(NamedTuple):
    """The request for `n` samples that came after `number` others."""

    number: int
    n: int


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Holds what is known of an engine's process."""

    process: ProcessId
    status: Literal["starting", "up", "down", "given up"] = "starting"
    """down: it has ended, and starts again once engines are awake."""
    version: int | None = None
    """Of its weights. None: it lacks some."""
    open: Mapping[int, RoutedRequest] = field(default_factory=dict)
    """Requests without an answer, by number."""
    samples: int = 0
    """Of these requests."""
    partial: int = 0
    """How many of these samples are finished, as last reported."""
    deaths: int = 0
    """In a row, without an answer between them."""

    @property
    def ready(self) -> bool:
        return self.status == "up" and self.version is not None

    @property
    def unfinished(self) -> int:
        return max(self.samples - self.partial, len(self.open))

    def given(self, request: RoutedRequest) -> Replica:
        open = {**self.open, request.number: request}
        return replace(self, open=open, samples=self.samples + request.n)

    def without(self, number: int, *, partial: int = 0) -> Replica:
        open = dict(self.open)
        samples = self.samples - open.pop(number).n
        return replace(self, open=open, samples=samples, partial=partial)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Requests without an answer, and the replicas for them."""

    window: int
    """A replica with fewer unfinished samples is given the next request."""
    max_restarts: int
    replicas: tuple[Replica, ...]
    waiting: tuple[RoutedRequest, ...] = ()
    arrived: int = 0
    """Number of the next request."""
    held_from: int | None = None
    """Requests from this number on wait for an update. None: all may begin."""
    asleep: bool = False
    version: int | None = None
    over: ChildProcessError | None = None
    """The error of all requests, once every replica is given up."""

    @property
    def drained(self) -> bool:
        """Whether every request that may begin has an answer."""
        return self._next is None and not any(one.open for one in self.replicas)

    @property
    def settled(self) -> bool:
        return all(one.status in ("up", "given up") for one in self.replicas)

    @property
    def supplied(self) -> bool:
        return any(one.ready for one in self.replicas)

    @property
    def lacking(self) -> tuple[ProcessId, ...]:
        """Processes that are up without the newest weights."""
        return tuple(one.process for one in self.replicas if one.status == "up" and not one.ready)

    @property
    def _next(self) -> RoutedRequest | None:
        first = self.waiting[0] if self.waiting else None
        held = first and self.held_from is not None and first.number >= self.held_from
        return None if held else first

    def works(self, process: ProcessId) -> bool:
        found = self.replicas[process.rank]
        return found.process == process and found.ready and bool(found.open) and not self.asleep


def routing(num_replicas: int, *, window: int, max_restarts: int) -> Routing:
    """Return the state in which every replica starts for the first time."""
    replicas = tuple(Replica(process=ProcessId(rank, 0)) for rank in range(num_replicas))
    return Routing(window=window, max_restarts=max_restarts, replicas=replicas)


@dataclass(frozen=True)
class Arrived:
    """A request came; its number is `state.arrived`."""

    n: int = 1


@dataclass(frozen=True)
class Cancelled:
    """Nobody waits for a request any more."""

    number: int


@dataclass(frozen=True)
class Answered:
    """A process answered a request, with an Exception if no replica can."""

    process: ProcessId
    number: int
    result: object
    partial: int = 0
    """Finished samples of its other open requests."""


@dataclass(frozen=True)
class Started:
    """A process is up, without weights."""

    process: ProcessId


@dataclass(frozen=True)
class Broke:
    """A process did not start, died, hangs or can't go on."""

    process: ProcessId
    error: Exception


@dataclass(frozen=True)
class Published:
    """There are new weights."""

    version: int


@dataclass(frozen=True)
class Supplied:
    """A process has all weights of a version."""

    process: ProcessId
    version: int


@dataclass(frozen=True)
class Held:
    """Requests that come from now on wait, until this is False."""

    value: bool


@dataclass(frozen=True)
class Asleep:
    """Engines may take no memory and compute nothing, until this is False.

    emptied: they lose their weights.
    """

    value: bool
    emptied: bool = False


@dataclass(frozen=True)
class Stopped:
    """All requests without an answer end with an error."""

    error: Exception


Event = (
    Arrived | Cancelled | Answered | Started | Broke | Published | Supplied | Held | Asleep
    | Stopped
)  # fmt: skip


@dataclass(frozen=True)
class Give:
    process: ProcessId
    number: int


@dataclass(frozen=True)
class Cancel:
    """Ignore what a request's call returns."""

    number: int


@dataclass(frozen=True)
class Reply:
    number: int
    result: Any


@dataclass(frozen=True)
class End:
    process: ProcessId


@dataclass(frozen=True)
class Start:
    process: ProcessId


@dataclass(frozen=True)
class Warn:
    message: str


Action = Give | Cancel | Reply | End | Start | Warn


def decide(state: Routing, event: Event) -> tuple[Routing, tuple[Action, ...]]:
    """Return the state after an event, and what is to be done, in order.

    Requests begin in order of arrival, each with the replica that has the fewest unfinished
    samples, and only with the newest weights. The requests of a process that breaks come before
    all that wait.

    >>> state, actions = decide(routing(1, window=8, max_restarts=3), Arrived(n=2))
    >>> for event in Started(ProcessId(0, 0)), Published(7), Supplied(ProcessId(0, 0), 7):
    ...     state, actions = decide(state, event)
    >>> actions
    (Give(process=ProcessId(rank=0, start=0), number=0),)
    """
    state, actions = _noted(state, event)
    if state.over is not None:
        failed = [Reply(request.number, state.over) for request in state.waiting]
        return replace(state, waiting=()), (*actions, *failed)
    given: list[Action] = []
    while not state.asleep and (request := state._next):
        able = [one for one in state.replicas if one.ready and one.unfinished < state.window]
        if not able:
            break
        chosen = min(able, key=lambda one: one.unfinished)
        state = _with(state, chosen.given(request), waiting=state.waiting[1:])
        given.append(Give(chosen.process, request.number))
    return state, (*actions, *given)


def _noted(state: Routing, event: Event) -> tuple[Routing, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    if isinstance(event, Answered | Started | Broke | Supplied):
        found = state.replicas[event.process.rank]
        if found.process != event.process:  # it has been ended
            return state, ()
    match event:
        case Arrived(n):
            waiting = (*state.waiting, RoutedRequest(state.arrived, n))
            state = replace(state, waiting=waiting, arrived=state.arrived + 1)
        case Cancelled(number):
            waiting = tuple(one for one in state.waiting if one.number != number)
            state = replace(state, waiting=waiting)
            for one in state.replicas:
                if number in one.open:
                    return _with(state, one.without(number)), (Cancel(number),)
        case Answered(_, number, result, partial) if number in found.open:
            deaths = found.deaths if isinstance(result, Exception) else 0
            found = replace(found.without(number, partial=partial), deaths=deaths)
            state, actions = _with(state, found), (Reply(number, result),)
        case Started():
            state = _with(state, replace(found, status="up"))
        case Broke(_, error):
            return _broke(state, found, error)
        case Published(version):
            state = replace(_emptied(state), version=version)
        case Supplied(_, version) if state.version is not None and version >= state.version:
            state = _with(state, replace(found, version=version))
        case Held(held):
            state = replace(state, held_from=state.arrived if held else None)
        case Asleep(True, emptied):
            state = replace(_emptied(state) if emptied else state, asleep=True)
        case Asleep(False):
            down = [one for one in state.replicas if one.status == "down"]
            for one in down:
                state = _with(state, replace(one, status="starting"))
            state, actions = replace(state, asleep=False), tuple(Start(one.process) for one in down)
        case Stopped(error):
            ends: list[Action] = [Reply(request.number, error) for request in state.waiting]
            for one in state.replicas:
                for number in one.open:
                    ends += [Cancel(number), Reply(number, error)]
            idle = tuple(replace(one, open={}, samples=0, partial=0) for one in state.replicas)
            return replace(state, waiting=(), replicas=idle), tuple(ends)
    return state, actions


def _broke(state: Routing, broken: Replica, error: Exception) -> tuple[Routing, tuple[Action, ...]]:
    rank, deaths = broken.process.rank, broken.deaths + 1
    reason = str(error) or repr(error)
    following = ProcessId(rank, broken.process.start + 1)
    actions: list[Action] = [End(broken.process), *map(Cancel, broken.open)]
    message, over = f"replica {rank} is started again: {reason}", None
    status: Literal["starting", "down", "given up"] = "down" if state.asleep else "starting"
    if deaths > state.max_restarts:
        status = "given up"
        message = (
            f"replica {rank} has ended {deaths} times in a row without finishing a prompt"
            f" (generation.max_restarts is {state.max_restarts}), the last time because {reason}"
        )
        if all(one.status == "given up" for one in state.replicas if one is not broken):
            over = ChildProcessError(message)
        message = f"the run continues without it: {message}"
    elif not state.asleep:
        actions.append(Start(following))
    if over is None:
        actions.append(Warn(message))
    waiting = tuple(sorted((*state.waiting, *broken.open.values())))
    fresh = Replica(process=following, status=status, deaths=deaths)
    return _with(state, fresh, waiting=waiting, over=over), tuple(actions)


def _with(state: Routing, replica: Replica, **changes: object) -> Routing:
    rank = replica.process.rank
    replicas = (*state.replicas[:rank], replica, *state.replicas[rank + 1 :])
    return replace(state, replicas=replicas, **changes)  # type: ignore[arg-type]


def _emptied(state: Routing) -> Routing:
    return replace(state, replicas=tuple(replace(one, version=None) for one in state.replicas))


class RequestRouter:
    """Notes events, executes their actions by `act`, and raises nothing.

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
        """Apply an event and act on it. Called on the event loop."""
        self.state, actions = decide(self.state, event)
        for action in actions:
            self._act(action)
        self._changed.set()

    async def until(self, condition: Callable[[Routing], bool]) -> None:
        """Wait until a condition holds. Called on the event loop."""
        while not condition(self.state):
            self._changed.clear()
            await self._changed.wait()

    def send(self, event: Event) -> None:
        """Note an event from another thread."""

        async def noted() -> None:
            self.note(event)

        self.do(noted())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result to another thread. Raises ClusterLost."""
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

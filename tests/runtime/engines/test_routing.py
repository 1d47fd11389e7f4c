"""Laws of the routing, whatever comes: no request is lost or answered twice; they begin in order
of arrival, where there is room, with the newest weights.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemorl.runtime.engines.routing import (
    Answered,
    Arrived,
    Asleep,
    Broke,
    Cancel,
    Cancelled,
    End,
    Give,
    Held,
    ProcessId,
    Published,
    Reply,
    RequestRouter,
    Start,
    Started,
    Stopped,
    Supplied,
    Warn,
    decide,
    routing,
)

WINDOW, MAX_RESTARTS, REPLICAS = 4, 2, 3
SIZES = st.lists(st.integers(1, 2 * WINDOW), min_size=1, max_size=6)


@dataclass
class Engine:
    """A process, which the routing knows by events alone."""

    up: bool = False
    version: int | None = None
    finished: dict[int, int] = field(default_factory=dict)
    """Finished samples of each unfinished request."""
    answers: dict[int, int] = field(default_factory=dict)
    """Of each answer on its way, what it says of other requests' finished samples."""
    overstated: bool = False
    """The last answer said more than is true by now: another one has overtaken it, or a request
    was cancelled."""

    @property
    def open(self):
        """Its requests without a reply."""
        return {*self.finished, *self.answers}


class RoutingLaws(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.state = routing(REPLICAS, window=WINDOW, max_restarts=MAX_RESTARTS)
        self.engines = {one.process: Engine() for one in self.state.replicas}
        self.gone: list[ProcessId] = []
        self.open: dict[int, int] = {}
        """Samples of each request without a reply, by number."""
        self.given: dict[int, ProcessId] = {}
        self.replies: dict[int, object] = {}
        self.deaths = dict.fromkeys(range(REPLICAS), 0)
        self.told: list[str] = []
        self.version = self.barrier = None
        self.count, self.asleep = 0, False

    @initialize(up=st.integers(0, REPLICAS), sizes=SIZES)
    def begin(self, up, sizes):
        """Most laws are about requests, and replicas with weights."""
        if up:
            self.publish(0, 0)
        for process in list(self.engines)[:up]:
            self.be_ready(process)
        self.arrive(sizes)

    def be_ready(self, process):
        if not self.engines[process].up:
            self.engines[process].up = True
            self.happened(Started(process))
        self.engines[process].version = self.version
        self.happened(Supplied(process, self.version))

    def happened(self, event):
        before = self.state
        open = [dict(one.open) for one in before.replicas]
        self.state, actions = decide(self.state, event)
        assert [one.open for one in before.replicas] == open
        for action in actions:
            self.act(action)

    def act(self, action):
        match action:
            case Give(process, number):
                engine = self.engines[process]
                assert engine.up and not self.asleep and engine.version == self.version is not None
                assert len(engine.open) < WINDOW
                assert engine.overstated or self.unfinished(engine) < WINDOW
                assert number == min(self.admitted())
                engine.finished[number] = 0
                self.given[number] = process
            case Cancel(number):
                engine = self.engines.get(self.given.pop(number))
                if engine:
                    engine.finished.pop(number, None)
                    engine.answers.pop(number, None)
                    engine.overstated = False
            case Reply(number, result):
                del self.open[number]
                assert number not in self.replies
                self.replies[number] = result
            case End(process):
                del self.engines[process]
                self.gone.append(process)
            case Start(process):
                assert not self.asleep and process.rank not in {one.rank for one in self.engines}
                assert process not in self.gone
                self.engines[process] = Engine()
            case Warn(message):
                self.told.append(message)

    def unfinished(self, engine):
        return sum(self.open[number] - done for number, done in engine.finished.items())

    def admitted(self):
        """Requests that may begin."""
        barrier = self.count if self.barrier is None else self.barrier
        return [number for number in self.open if number not in self.given and number < barrier]

    def some(self, data, found):
        return data.draw(st.sampled_from(sorted(found)))

    @property
    def at_work(self):
        return [process for process, engine in self.engines.items() if engine.finished]

    @property
    def given_up(self):
        return [rank for rank, deaths in self.deaths.items() if deaths > MAX_RESTARTS]

    @rule(sizes=SIZES)
    def arrive(self, sizes):
        for n in sizes:
            self.open[self.count] = n
            self.count += 1
            self.happened(Arrived(n))

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.integers(0, self.count - 1))
        self.open.pop(number, None)
        self.happened(Cancelled(number))

    @precondition(lambda self: self.at_work)
    @rule(data=st.data(), whole=st.booleans())
    def compute(self, data, whole):
        """All samples of a request but one may be finished without a word."""
        engine = self.engines[self.some(data, self.at_work)]
        number = self.some(data, engine.finished)
        if whole:
            del engine.finished[number]
            engine.answers[number] = sum(engine.finished.values())
        else:
            most = self.open[number] - 1
            engine.finished[number] = data.draw(st.integers(engine.finished[number], most))

    @precondition(lambda self: any(engine.answers for engine in self.engines.values()))
    @rule(data=st.data())
    def answer(self, data):
        """In any order."""
        process = self.some(data, [id for id, one in self.engines.items() if one.answers])
        engine = self.engines[process]
        number = self.some(data, engine.answers)
        partial = engine.answers.pop(number)
        engine.overstated = partial > sum(engine.finished.values())
        del self.given[number]
        self.deaths[process.rank] = 0
        self.happened(Answered(process, number, "samples", partial))
        assert self.replies[number] == "samples" and number not in self.open

    @precondition(lambda self: self.at_work)
    @rule(data=st.data())
    def refuse(self, data):
        """It finds that no replica can answer this."""
        process = self.some(data, self.at_work)
        engine, error = self.engines[process], ValueError("no")
        number = self.some(data, engine.finished)
        del engine.finished[number], self.given[number]
        engine.overstated = False
        self.happened(Answered(process, number, error))
        assert self.replies[number] is error and number not in self.open

    @precondition(lambda self: self.gone and self.count)
    @rule(data=st.data(), which=st.sampled_from(["answered", "broke", "started", "supplied"]))
    def late(self, data, which):
        """What an ended process says changes nothing."""
        process, number = self.some(data, self.gone), data.draw(st.integers(0, self.count - 1))
        before = self.state
        self.happened(
            {
                "answered": Answered(process, number, "late", 0),
                "broke": Broke(process, OSError("late")),
                "started": Started(process),
                "supplied": Supplied(process, self.version or 0),
            }[which]
        )
        assert self.state == before

    @precondition(lambda self: self.engines and self.count)
    @rule(data=st.data())
    def answer_unasked(self, data):
        """An answer to another's request changes nothing."""
        process = self.some(data, self.engines)
        number = data.draw(st.integers(0, self.count - 1))
        if number not in self.engines[process].open:
            before = self.state
            self.happened(Answered(process, number, "unasked", 1))
            assert self.state == before

    @precondition(lambda self: any(not engine.up for engine in self.engines.values()))
    @rule(data=st.data())
    def start(self, data):
        process = self.some(data, [id for id, engine in self.engines.items() if not engine.up])
        self.engines[process].up = True
        self.happened(Started(process))

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def die(self, data):
        process = self.some(data, self.engines)
        self.deaths[process.rank] += 1
        self.happened(Broke(process, OSError("it died")))
        assert process not in self.engines

    @rule(version=st.integers(0, 3), lacking=st.integers(0, REPLICAS))
    def publish(self, version, lacking):
        """`lacking` replicas get these weights later, or never."""
        self.version = version
        for engine in self.engines.values():
            engine.version = None
        self.happened(Published(version))
        up = [process for process, engine in self.engines.items() if engine.up]
        for process in up[lacking:]:
            self.be_ready(process)

    @precondition(lambda self: any(engine.up for engine in self.engines.values()))
    @rule(data=st.data(), old=st.booleans())
    def supply(self, data, old):
        """With `old`, newer weights have been published."""
        process = self.some(data, [id for id, engine in self.engines.items() if engine.up])
        if old or self.version is None:
            self.happened(Supplied(process, -1))
        else:
            self.engines[process].version = self.version
            self.happened(Supplied(process, self.version))

    @precondition(lambda self: self.engines and self.version is not None)
    @rule(data=st.data())
    def come_back(self, data):
        """With the newest weights."""
        self.be_ready(self.some(data, self.engines))

    @rule(to=st.sampled_from(["wake", "sleep", "forget"]))
    def rest(self, to):
        """Engines sleep once all have started; to forget is to lose the weights, too."""
        if to == "wake" or self.state.settled:
            self.asleep = to != "wake"
            for engine in self.engines.values():
                engine.version = None if to == "forget" else engine.version
            self.happened(Asleep(self.asleep, to == "forget"))

    @rule(value=st.booleans())
    def hold(self, value):
        self.barrier = self.count if value else None
        self.happened(Held(value))

    @precondition(lambda self: self.open)
    @rule()
    def stop(self):
        error = RuntimeError("stopped")
        ended = list(self.open)
        self.happened(Stopped(error))
        assert not self.open and all(self.replies[number] is error for number in ended)

    @invariant()
    def none_is_lost(self):
        waiting = [request.number for request in self.state.waiting]
        at_work = [number for one in self.state.replicas for number in one.open]
        assert sorted(waiting + at_work) == sorted(self.open)
        assert waiting == sorted(waiting) and sorted(at_work) == sorted(self.given)
        assert self.state.drained == (not self.given and not self.admitted())

    @invariant()
    def no_engine_with_room_is_idle_while_a_request_may_begin(self):
        if self.admitted() and not self.asleep and self.version is not None:
            ready = [one for one in self.engines.values() if one.version == self.version]
            assert all(engine.open for engine in ready)

    @invariant()
    def engines_without_the_newest_weights_are_known(self):
        lacking = [id for id, one in self.engines.items() if one.up and one.version is None]
        assert sorted(self.state.lacking) == sorted(lacking)

    @invariant()
    def engines_have_at_least_as_much_to_do_as_is_known(self):
        for one in self.state.replicas:
            engine = self.engines.get(one.process, Engine())
            assert one.open.keys() == engine.open and one.unfinished >= len(engine.open)
            assert engine.overstated or one.unfinished >= self.unfinished(engine)

    @invariant()
    def a_replica_is_given_up_after_its_deaths_in_a_row(self):
        found = [one.process.rank for one in self.state.replicas if one.status == "given up"]
        assert found == self.given_up
        assert [one.deaths for one in self.state.replicas] == list(self.deaths.values())
        assert (self.state.over is not None) == (len(found) == REPLICAS)
        if self.state.over:
            assert not self.open and "has ended 3 times in a row" in str(self.state.over)

    def teardown(self):
        """Once all goes well, every request has its reply."""
        self.hold(False)
        self.rest("wake")
        self.publish(7, REPLICAS)
        for process in list(self.engines):
            self.be_ready(process)
        while self.given:
            number, process = next(iter(self.given.items()))
            del self.given[number]
            self.engines[process].finished.pop(number, None)
            self.engines[process].answers.pop(number, None)
            self.happened(Answered(process, number, "samples", 0))
        assert not self.open and self.state.drained


RoutingLaws.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestRoutingLaws = RoutingLaws.TestCase


def ready(num_replicas=2, window=8):
    """The state in which all replicas have weights."""
    state = routing(num_replicas, window=window, max_restarts=1)
    processes = [one.process for one in state.replicas]
    supplied = [Supplied(process, 0) for process in processes]
    for event in (Published(0), *map(Started, processes), *supplied):
        state, _ = decide(state, event)
    return state


def test_each_request_goes_to_the_replica_with_the_fewest_unfinished_samples():
    state, ranks = ready(3), []
    for n in (3, 2, 1, 1, 1, 2):
        state, (give,) = decide(state, Arrived(n))
        ranks.append(give.process.rank)
    assert ranks == [0, 1, 2, 2, 1, 2]


def test_a_request_begins_where_there_is_room_for_one_of_its_samples():
    state = ready(1, window=4)
    state, (give,) = decide(state, Arrived(3))
    state, (second,) = decide(state, Arrived(3))
    state, none = decide(state, Arrived(1))
    assert (give.number, second.number, none) == (0, 1, ())
    state, actions = decide(state, Answered(give.process, 0, "samples", 2))
    assert actions == (Reply(0, "samples"), Give(give.process, 2))


def test_nobody_waits_for_a_router_that_is_closed():
    router = RequestRouter(routing(1, window=1, max_restarts=0), lambda action: None, lambda: None)
    router.loop.call_soon_threadsafe(router.loop.stop)
    router._thread.join()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(router.send, Arrived())
        assert not wait([waiting], timeout=0.1).done
        router.loop.close()
        with pytest.raises(RuntimeError, match="shut down meanwhile"):
            waiting.result(timeout=30)

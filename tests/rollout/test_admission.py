"""Admission by events in any order: no lock, nothing stale, nothing lost or doubled."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemorl.rollout.admission import (
    STALE,
    Admission,
    Begin,
    Drop,
    Dropped,
    Finished,
    Hand,
    Trained,
    Updated,
    Wanted,
    decide,
)


class Loop(RuleBasedStateMachine):
    """A trainer and engines that do what they may in any order."""

    @initialize(
        staleness=st.integers(0, 4),
        batch=st.integers(1, 5),
        last=st.none() | st.integers(1, 6),
        whole=st.booleans(),
    )
    def begin(self, staleness: int, batch: int, last: int | None, whole: bool) -> None:
        self.state = Admission(staleness=staleness, batch=batch, last=last)
        self.whole = whole
        """Whether each step takes `batch` groups at least."""
        self.running = set[int]()
        self.began: dict[int, int] = {}
        self.trained: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self.handed = list[int]()
        self.waits = False
        self.asked = self.taken = 0

    def feed(self, event: object) -> None:
        self.state, actions = decide(self.state, event)  # type: ignore[arg-type]
        for action in actions:
            match action:
                case Begin(number):
                    again = isinstance(event, Updated) and event.again and number in self.began
                    assert again or number == len(self.began), "groups begin in order"
                    self.began[number] = self.state.version
                    self.running.add(number)
                case Drop(number, reason):
                    self.dropped[number] = reason
                    self.running.discard(number)
                case Hand(numbers):
                    assert self.waits and len(numbers) == self.asked
                    assert not self.running.intersection(numbers)
                    self.handed += numbers
                    self.taken += len(numbers)
                    self.waits = False

    @property
    def over(self) -> bool:
        return self.state.last is not None and self.state.step >= self.state.last

    @precondition(lambda self: not self.waits and not self.over)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        batch = self.state.batch
        lowest = batch if self.whole and not self.taken else 1
        self.asked = data.draw(st.integers(lowest, batch if self.taken else 2 * batch), "count")
        self.waits = True
        self.feed(Wanted(self.asked))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)), "group")
        self.running.discard(number)
        self.feed(Finished(number))

    @precondition(lambda self: self.handed and not self.waits)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        """Drop some of the groups, as dynamic sampling does, and draw as many again."""
        numbers = data.draw(st.lists(st.sampled_from(self.handed), min_size=1, unique=True))
        self.handed = [number for number in self.handed if number not in numbers]
        self.dropped |= dict.fromkeys(numbers, "uninformative")
        self.feed(Dropped(tuple(numbers)))

    @precondition(lambda self: self.taken and not self.waits)
    @rule(updates=st.booleans(), again=st.booleans())
    def train(self, updates: bool, again: bool) -> None:
        step = self.state.step
        for number in self.handed:
            assert number not in self.trained
            assert step - self.began[number] <= self.state.staleness, "a token is too old"
            self.trained[number] = step
        self.handed, self.taken = [], 0
        self.feed(Trained())
        if updates:
            self.feed(Updated(again))

    @rule()
    def update(self) -> None:
        self.feed(Updated())

    @invariant()
    def nothing_is_lost(self) -> None:
        groups = [group.number for group in self.state.open]
        assert sorted([*groups, *self.trained, *self.dropped]) == list(range(len(self.began)))

    @invariant()
    def in_order(self) -> None:
        """None is overtaken: what is trained on, or dropped as not informative, came first."""
        waiting = [group.number for group in self.state.open if not group.handed]
        passed = [*self.trained, *(n for n, why in self.dropped.items() if why != STALE)]
        assert not waiting or max([-1, *passed, *self.handed]) < min(waiting)

    @invariant()
    def bounded(self) -> None:
        one = self.state
        waiting = sum(not group.handed for group in one.open)
        assert waiting <= max(one.batch, one.wanted) + one.staleness * one.batch
        if self.whole:
            assert STALE not in self.dropped.values(), "whole steps make nothing stale"

    @invariant()
    def no_deadlock(self) -> None:
        """Where the trainer waits and engines have its weights, a group that it waits for runs."""
        if self.waits and self.state.version == self.state.step:
            first = [group for group in self.state.open if not group.handed][: self.asked]
            assert len(first) == self.asked and any(not group.done for group in first)


Loop.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestLoop = Loop.TestCase


@given(batch=st.integers(1, 6), steps=st.integers(1, 6))
def test_staleness_of_0_is_the_synchronous_loop(batch: int, steps: int) -> None:
    """A step's groups begin with its weights, and nothing else does."""
    state, begun = Admission(staleness=0, batch=batch, last=steps), list[int]()
    for step in range(steps):
        before = len(begun)
        state, first = decide(state, Updated())
        state, then = decide(state, Wanted(batch))
        begun += [each.number for each in (*first, *then) if isinstance(each, Begin)]
        assert begun[before:] == list(range(step * batch, (step + 1) * batch))
        handed: tuple[int, ...] = ()
        for number in reversed(begun[before:]):
            state, actions = decide(state, Finished(number))
            handed += tuple(n for each in actions if isinstance(each, Hand) for n in each.numbers)
        assert handed == tuple(begun[before:])
        state, actions = decide(state, Trained())
        assert actions == ()


@given(
    st.integers(0, 4),
    st.lists(st.integers(1, 1000), min_size=12, max_size=40),
    st.integers(1, 4),
)
def test_slow_groups_are_trained_on_with_their_own_step(
    staleness: int, lengths: list[int], batch: int
) -> None:
    """Whatever takes how long, step s trains on groups s·batch … (s + 1)·batch − 1: prompts and
    lengths are those of the synchronous run, step by step.
    """
    steps = len(lengths) // batch
    state, ends, now = Admission(staleness=staleness, batch=batch, last=steps), {}, 0
    trained = list[tuple[int, ...]]()
    for _ in range(steps):
        state, first = decide(state, Updated())
        state, then = decide(state, Wanted(batch))
        actions = [*first, *then]
        while True:
            for action in actions:
                if isinstance(action, Begin):
                    ends[action.number] = now + lengths[action.number]
            handed = [action for action in actions if isinstance(action, Hand)]
            if handed:
                trained.append(handed[0].numbers)
                break
            number = min(ends, key=lambda each: (ends[each], each))
            now = max(now, ends.pop(number))
            state, more = decide(state, Finished(number))
            actions = list(more)
        state, _ = decide(state, Trained())
    every = [tuple(range(step * batch, (step + 1) * batch)) for step in range(steps)]
    assert trained == every
    assert Counter(n for each in trained for n in each).most_common(1)[0][1] == 1


def test_a_small_step_makes_groups_stale_and_draws_others() -> None:
    """A step that takes less than `batch` lets groups grow old: they are dropped by name."""
    state, _ = decide(Admission(staleness=1, batch=2), Wanted(1))
    for number in range(4):
        state, actions = decide(state, Finished(number))
        assert actions == ((Hand((0,)),) if number == 0 else ())
    state, actions = decide(decide(state, Trained())[0], Updated())
    state, actions = decide(state, Wanted(1))
    assert Hand((1,)) in actions
    state, actions = decide(state, Trained())
    assert actions[:2] == (Drop(2, STALE), Drop(3, STALE))

"""Groups by events in any order: no lock, nothing stale, nothing lost, given or taken twice."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemorl.data.rows import RowOrder
from nemorl.rollout.admission import STALE, Ended, LoopState, Updated, Wanted, decide

ORDERS = {"train": RowOrder(sizes=(7,)), "replay": RowOrder(sizes=(3,), seed=2)}


def stream(**options: int | None) -> dict[str, Any]:
    return {"stream": "train", "order": ORDERS["train"], **options}


class Loop(RuleBasedStateMachine):
    """A trainer and engines that do what they may in any order."""

    @initialize(
        staleness=st.integers(0, 4),
        batch=st.integers(1, 5),
        last=st.none() | st.integers(1, 6),
        whole=st.booleans(),
    )
    def begin(self, staleness: int, batch: int, last: int | None, whole: bool) -> None:
        self.state, self.batch, self.staleness, self.last = LoopState(0), batch, staleness, last
        self.options = stream(batch=batch, staleness=staleness, last=last)
        self.whole = whole
        """Whether each step takes `batch` groups at least."""
        self.running = set[int]()
        self.began: dict[int, int] = {}
        self.trained: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self.given = list[int]()
        self.waits = False
        self.asked = self.taken = 0

    def feed(self, event: Wanted | Ended | Updated) -> None:
        self.state, actions = decide(self.state, event, **self.options)
        self.dropped |= dict.fromkeys(actions.stop, STALE)
        self.running -= {*actions.stop}
        for group in actions.begin:
            again = isinstance(event, Updated) and event.again and group.ordinal in self.running
            assert again or group.ordinal == len(self.began), "groups begin in order"
            self.began[group.ordinal] = self.state.synced
            self.running.add(group.ordinal)
        if actions.give:
            assert self.waits and len(actions.give) == self.asked
            assert not self.running.intersection(actions.give)
            self.given += actions.give
            self.taken += len(actions.give)
            self.waits = False

    @precondition(lambda self: not self.waits and self.state.step != self.last)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        lowest = self.batch if self.whole and not self.taken else 1
        largest = self.batch if self.taken else 2 * self.batch
        self.asked = data.draw(st.integers(lowest, largest), "count")
        self.waits = True
        self.feed(Wanted(self.asked))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)), "group")
        self.running.discard(number)
        self.feed(Ended((number,)))

    @precondition(lambda self: self.given and not self.waits)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        """Drop some of the groups, as dynamic sampling does, and draw as many again."""
        numbers = data.draw(st.lists(st.sampled_from(self.given), min_size=1, unique=True))
        self.given = [number for number in self.given if number not in numbers]
        self.dropped |= dict.fromkeys(numbers, "uninformative")
        self.state = self.state.drop(numbers, "uninformative")

    @precondition(lambda self: self.taken and not self.waits)
    @rule(updates=st.booleans(), again=st.booleans())
    def train(self, updates: bool, again: bool) -> None:
        step = self.state.step
        for number in self.given:
            assert number not in self.trained
            assert step - self.began[number] <= self.staleness, "a token is too old"
            self.trained[number] = step
        self.state, line = self.state.advance()
        assert line["trained"] == self.given
        self.given, self.taken = [], 0
        if updates:
            self.feed(Updated(again))

    @rule()
    def update(self) -> None:
        self.feed(Updated())

    @invariant()
    def nothing_is_lost(self) -> None:
        groups = [group.ordinal for group in self.state.open_groups]
        assert sorted([*groups, *self.trained, *self.dropped]) == list(range(len(self.began)))

    @invariant()
    def in_order(self) -> None:
        """None is overtaken: what is trained on, or dropped as not informative, came first."""
        ahead = [group.ordinal for group in self.state.ahead("train")]
        passed = [*self.trained, *(n for n, why in self.dropped.items() if why != STALE)]
        assert not ahead or max([-1, *passed, *self.given]) < min(ahead)

    @invariant()
    def bounded(self) -> None:
        asked = self.state.asked.get("train", 0)
        most = max(self.batch if self.staleness else 0, asked) + self.staleness * self.batch
        assert len(self.state.ahead("train")) <= most
        if self.whole:
            assert STALE not in self.dropped.values(), "whole steps make nothing stale"

    @invariant()
    def no_deadlock(self) -> None:
        """Where the trainer waits and engines have its weights, a group that it waits for runs."""
        if self.waits and self.state.synced == self.state.step:
            first = self.state.ahead("train")[: self.asked]
            assert len(first) == self.asked and any(group.state == "running" for group in first)


Loop.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestLoop = Loop.TestCase


def test_a_small_step_makes_groups_stale_and_draws_others() -> None:
    """A step that takes less than `batch` lets groups grow old: they are dropped by name."""
    options = stream(batch=2, staleness=1)
    state, _ = decide(LoopState(0), Updated(), **options)
    state, _ = decide(state, Wanted(1), **options)
    for number in range(4):
        state, actions = decide(state, Ended((number,)), **options)
        assert actions.give == ((0,) if number == 0 else ())
    state, _ = decide(state.advance()[0], Updated(), **options)
    state, actions = decide(state, Wanted(1), **options)
    assert actions.give == (1,)
    state, actions = decide(state.advance()[0], Updated(), **options)
    assert actions.stop == (2, 3) == state.dropped[STALE]
    assert [group.ordinal for group in state.ahead("train")] == [*range(4, 8)]


takes = st.tuples(
    st.sampled_from(sorted(ORDERS)), st.integers(1, 5), st.integers(0, 2), st.booleans()
)
"""An order, how many prompts of it, how many steps ahead, and whether they are sampled at once."""


@given(st.integers(0, 2**62), st.lists(st.lists(takes, max_size=3), min_size=1, max_size=5))
def test_no_group_is_lost_or_given_twice(seed: int, loop: list):
    """Each ordinal is given once in a process; a resumed one gives again those that are open, and
    the rows that they had.
    """
    state, given = LoopState(seed), []
    for number, taken in enumerate(loop, start=1):
        for name, count, ahead, at_once in taken:
            state, groups = state.take_groups(name, ORDERS[name], count, step=number + ahead)
            assert all(group.row < ORDERS[name].num_rows for group in groups)
            given += [group.ordinal for group in groups]
            if at_once:
                state = state.put([replace(group, state="given") for group in groups])
        state, _ = state.advance()
        assert state.step == number and all(group.step > number for group in state.open_groups)
    assert sorted(given) == list(range(state.groups)) == list(range(sum(state.cursors.values())))

    resumed, again = LoopState.resumed(json.loads(json.dumps(state.saved()))), []
    waiting = [replace(group, step=None, state="waiting") for group in state.open_groups]
    assert resumed == replace(state, open_groups=tuple(waiting))
    for group in waiting:
        resumed = resumed.advance()[0]  # a step that does not take them keeps them
        resumed, taken = resumed.take_groups(group.stream, ORDERS[group.stream], 1)
        again += taken
        resumed = resumed.put([replace(each, step=99) for each in taken])
    again = [replace(group, state="waiting") for group in again]
    assert sorted(again, key=lambda group: group.ordinal) == waiting
    assert (resumed.groups, resumed.cursors) == (state.groups, state.cursors)


def test_a_checkpoint_of_groups_ahead() -> None:
    """They are drawn again, and come before others."""
    options = stream(batch=2, staleness=1)
    state, _ = decide(LoopState(0), Updated(), **options)
    state, _ = decide(state, Ended((1,)), **options)
    saved = state.advance()[0].saved()
    rows = ORDERS["train"].take(0, 4)
    assert list(saved) == ["seed", "step", "cursors", "groups", "open_groups", "dropped", "data"]
    assert saved["open_groups"] == [
        {"ordinal": number, "stream": "train", "row": row, "step": None, "sampled": True}
        for number, row in enumerate(rows)
    ]
    state, actions = decide(LoopState.resumed(saved), Updated(), **options)
    assert [(group.ordinal, group.begun) for group in actions.begin] == [(n, 1) for n in range(4)]
    assert state.groups == state.cursors["train"] == 4


def test_a_group_is_dropped_once():
    state, _ = LoopState(0).take_groups("train", ORDERS["train"], 4, step=1)
    state = state.drop([1, 1], "a").drop([0, 2], "b")
    assert state.dropped == {"a": (1,), "b": (0, 2)}
    with pytest.raises(ValueError, match=r"groups to drop must be open: .* but it is \[1, 2\]"):
        state.drop([3, 2, 1], "a")
    with pytest.raises(ValueError, match=r"groups to drop .* but it is \[3\]"):
        state.advance()[0].drop([3], "a")

"""What a loop has taken: every group once, until the step that trains on it has ended."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.data.rows import RowOrder
from nemorl.runtime.store.state import LoopState

ORDERS = {"train": RowOrder(sizes=(7,)), "replay": RowOrder(sizes=(3,), seed=2)}
takes = st.tuples(
    st.sampled_from(sorted(ORDERS)), st.integers(1, 5), st.integers(0, 2), st.booleans()
)
"""An order, how many prompts of it, how many steps ahead, and whether they are sampled at once."""
steps = st.lists(st.lists(takes, max_size=3), min_size=1, max_size=5)


def after_a_kill(state: LoopState) -> LoopState:
    return LoopState.resumed(json.loads(json.dumps(asdict(state))))


def go(state: LoopState, taken: list) -> tuple[LoopState, list[int]]:
    """A step that takes and samples: the state after it, and the numbers that it took."""
    numbers = []
    for name, count, ahead, at_once in taken:
        state, groups = state.take_groups(name, ORDERS[name], count, step=state.step + 1 + ahead)
        ordinals = [group.ordinal for group in groups]
        numbers += ordinals
        assert all(group.row < ORDERS[name].num_rows for group in groups)
        if at_once:
            state, sampled = state.sample(ordinals, count)
            assert sampled == ordinals
    return state.advance(), numbers


@given(st.integers(0, 2**62), steps)
def test_no_group_is_lost_or_given_twice(seed: int, loop: list):
    """Each number is given once in a process; a resumed one gives again those that are open, and
    the rows that they had.
    """
    state, given = LoopState(seed), []
    for number, taken in enumerate(loop, start=1):
        state, numbers = go(state, taken)
        given += numbers
        assert state.step == number and all(group.step > number for group in state.open_groups)
    assert sorted(given) == list(range(state.groups)) == list(range(sum(state.cursors.values())))

    resumed, again = after_a_kill(state), []
    assert replace(resumed, open_groups=()) == replace(state, open_groups=())
    assert all(group.step is None and not group.sampled for group in resumed.open_groups)
    while resumed.advance().open_groups:  # a step that does not take them keeps them
        group = resumed.open_groups[0]
        resumed, (same,) = resumed.take_groups(
            group.stream, ORDERS[group.stream], 1, step=resumed.step + 1
        )
        again.append(same)
        if resumed.open_groups[0].step is not None:
            resumed = resumed.advance()
    assert sorted(g.ordinal for g in again) == [g.ordinal for g in state.open_groups]
    assert {(g.ordinal, g.row, g.stream) for g in again} == {
        (g.ordinal, g.row, g.stream) for g in state.open_groups
    }
    assert (resumed.groups, resumed.cursors) == (state.groups, state.cursors)


@pytest.mark.parametrize(
    ("asked", "count", "found"),
    [
        ([], 2, [2, 3]),
        ([0, 0, 1], 3, [0, 2, 1]),
        ([9], 1, [2]),
    ],
)
def test_a_number_is_sampled_once(asked: list[int], count: int, found: list[int]):
    state, _ = LoopState(0).take_groups("train", ORDERS["train"], 2, step=1)
    after, numbers = state.sample(asked, count)
    assert numbers == found and after.groups == max([1, *found]) + 1
    again, others = after.sample(found, len(found))
    assert not set(others) & set(found)
    assert again.advance().sample(found, len(found))[1][0] == again.groups


def test_a_group_is_dropped_once():
    state, _ = LoopState(0).take_groups("train", ORDERS["train"], 4, step=1)
    state = state.drop([1, 1], "a").drop([0, 2], "b")
    assert state.dropped == {"a": (1,), "b": (0, 2)}
    with pytest.raises(ValueError, match=r"groups to drop must be open: .* but it is \[1, 2\]"):
        state.drop([3, 2, 1], "a")
    with pytest.raises(ValueError, match=r"groups to drop .* but it is \[3\]"):
        state.advance().drop([3], "a")

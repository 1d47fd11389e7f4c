import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from nemorl.runtime.run.state import LoopState

counts = st.integers(min_value=0, max_value=2**62)
states = st.builds(LoopState, seed=counts, step=counts, cursor=counts, policy_version=counts)


@given(states)
def test_state_survives_json(state):
    assert LoopState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@given(states)
def test_state_is_a_pytree(state):
    leaves, spec = pytree.tree_flatten(state)
    assert leaves == [state.seed, state.step, state.cursor, state.policy_version]
    assert pytree.tree_unflatten(leaves, spec) == state


@given(states, st.integers(1, 100))
def test_advancing_leaves_the_old_state_alone(state, rows):
    before = state.to_dict()
    after = state.advance(rows=rows, updates=3)
    assert state.to_dict() == before
    assert (after.seed, after.step, after.cursor, after.policy_version) == (
        state.seed,
        state.step + 1,
        state.cursor + rows,
        state.policy_version + 3,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly the fields seed, step, cursor, policy_version, but it has none"),
        (
            {"seed": 0, "step": 1, "cursor": 2, "policy_version": 3, "epoch": 4},
            "but it has cursor, epoch",
        ),
        (
            {"seed": 0, "step": 1.5, "cursor": 2, "policy_version": 3},
            "step of a loop state must be an integer, but it is 1.5",
        ),
        (
            {"seed": 0, "step": True, "cursor": 2, "policy_version": 3},
            "step of a loop state must be an integer, but it is True",
        ),
    ],
)
def test_other_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LoopState.from_dict(values)

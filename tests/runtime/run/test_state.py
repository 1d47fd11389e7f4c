from hypothesis import given
from hypothesis import strategies as st

from nemorl.runtime.run.state import LoopState

counts = st.integers(min_value=0, max_value=2**62)
states = st.builds(LoopState, seed=counts, step=counts, cursor=counts, policy_version=counts)


@given(states, st.integers(1, 100))
def test_advancing(state, rows):
    after = state.advance(rows=rows, updates=3)
    assert (after.seed, after.step, after.cursor, after.policy_version) == (
        state.seed,
        state.step + 1,
        state.cursor + rows,
        state.policy_version + 3,
    )

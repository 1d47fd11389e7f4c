from hypothesis import given
from hypothesis import strategies as st

from nemorl.runtime.run.state import LoopState

counts = st.integers(min_value=0, max_value=2**62)
cursors = st.dictionaries(st.text(max_size=3), counts)
states = st.builds(LoopState, seed=counts, step=counts, cursors=cursors)


@given(states, cursors)
def test_advancing(state, taken):
    after = state.advance(taken)
    assert (after.seed, after.step, after.cursors) == (state.seed, state.step + 1, taken)

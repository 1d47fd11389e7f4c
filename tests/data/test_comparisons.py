"""Sequences that stay together in a row, and the mismatched ones of KTO's baseline."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemorl.data.batch import Example
from nemorl.data.comparisons import collate_together, mismatched


def example(prompt: list[int], response: list[int]) -> Example:
    mask = [False] * len(prompt) + [True] * len(response)
    return Example(input_ids=[*prompt, *response], loss_mask=mask, response_mask=mask)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6))
def test_rows_hold_their_sequences_in_order(lengths):
    rows = [
        tuple(example([row + 1], [place + 1] * length) for place, length in enumerate(sizes))
        for row, sizes in enumerate(lengths)
    ]
    batch = collate_together(rows)
    assert len(batch) == len(rows)
    for row, sequences in enumerate(rows):
        length = sum(one.num_tokens for one in sequences)
        assert batch.input_ids[row, :length].tolist() == [
            token for one in sequences for token in one.input_ids
        ]
        assert batch.segment_ids[row, :length].tolist() == [
            segment for segment, one in enumerate(sequences, 1) for _ in one.input_ids
        ]
        assert batch.position_ids[row, :length].tolist() == [
            place for one in sequences for place in range(one.num_tokens)
        ]
        assert not batch.segment_ids[row, length:].any()


PROMPTS = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(PROMPTS, st.integers(0, 99))
def test_another_prompts_response(prompts, seed):
    examples = [example([prompt], [10 + index, 50]) for index, prompt in enumerate(prompts)]
    found = mismatched(examples, max_length=3, seed=seed)
    assert found == mismatched(examples, max_length=3, seed=seed)
    for index, (prompt, other) in enumerate(zip(prompts, found, strict=True)):
        assert other.input_ids[0] == prompt
        partner = other.input_ids[1] - 10
        assert other.input_ids[1:] == examples[partner].input_ids[1:]
        assert other.loss_mask == [False, True, True]
        if len(set(prompts)) > 1:
            assert prompts[partner] != prompt
        elif len(prompts) > 1:
            assert partner != index, "with one prompt only, still another response"


def test_all_responses_take_part():
    """Chosen and rejected ones, which alternate in the data."""
    examples = [example([prompt], [10 + kind]) for prompt in range(1, 51) for kind in (0, 1)]
    kinds = [other.input_ids[1] - 10 for other in mismatched(examples, max_length=9)]
    assert 30 <= sum(kinds) <= 70
    assert mismatched(examples, max_length=9, seed=1) != mismatched(examples, max_length=9, seed=2)


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(9, [1, 2, 3, 7, 8, 9]), (5, [1, 2, 3, 7, 8]), (3, [1, 2, 3]), (2, [1, 2, 3])],
)
def test_worked_and_cut(max_length, expected):
    long, short = example([1, 2, 3], [4]), example([6], [7, 8, 9])
    first, second = mismatched([long, short], max_length=max_length)
    assert first.input_ids == expected
    assert first.loss_mask == first.response_mask == [False] * 3 + [True] * (len(expected) - 3)
    assert second.input_ids == [6, 4]

"""Limits that count what they take, of prompts, examples, pairs and judged answers."""

import pytest

from nemorl.data.batch import Example
from nemorl.data.lengths import limit_length, num_tokens
from nemorl.data.preferences import Pair
from nemorl.data.rows import Row


def example(prompt: int, response: int) -> Example:
    mask = [False] * prompt + [True] * response
    return Example(input_ids=list(range(prompt + response)), loss_mask=mask, response_mask=mask)


PAIRS = [
    Pair(chosen=example(2, 3), rejected=example(2, 6)),
    Pair(chosen=example(2, 1), rejected=example(2, 2)),
    Pair(chosen=example(2, 9), rejected=example(5, 1)),
]


def test_a_pair_is_as_long_as_its_longer_side_and_stays_whole():
    assert [num_tokens(pair) for pair in PAIRS] == [8, 4, 11]
    kept, report = limit_length(PAIRS, max_length=5, policy="drop")
    assert (kept, report.kept, report.num_dropped, report.longest) == ([PAIRS[1]], (1,), 2, 11)
    kept, report = limit_length(PAIRS, max_length=5, policy="truncate")
    assert (report.kept, report.num_truncated, report.num_dropped, report.num_tokens_cut) == (
        (0, 1),
        1,
        1,
        3,
    )
    assert (kept[0].chosen, kept[0].rejected) == (
        example(2, 3),
        example(2, 3),
    ), "the last pair has no trained token left on one side"
    with pytest.raises(ValueError, match="sequence 0 has 8 tokens, but the maximum is 5"):
        limit_length(PAIRS, max_length=5)


def test_judged_answers_keep_their_verdict():
    items = [(example(1, 5), True), (example(5, 1), False), (example(1, 1), False)]
    assert limit_length(items, max_length=4, policy="truncate")[0] == [
        (example(1, 3), True),
        (example(1, 1), False),
    ]
    kept, report = limit_length(items, max_length=4, policy="drop")
    assert (kept, report.longest) == ([items[2]], 6)


def test_the_error_names_the_row_it_was_made_of():
    with pytest.raises(
        ValueError,
        match=(
            r"^a\.jsonl, line 3: the sequence has 3 tokens, but the maximum is 2:"
            r" .*max_total_sequence_length.*data\.too_long"
        ),
    ):
        limit_length(
            [[1], [1, 2, 3]],
            max_length=2,
            rows=[{}, Row({"prompt": "a"}, origin="a.jsonl, line 3")],
        )


@pytest.mark.parametrize("policy", ["error", "truncate", "drop"])
def test_what_just_fits_stays_as_it_is(policy):
    kept, report = limit_length([[1, 2], [1]], max_length=2, policy=policy)
    assert (kept, report.num_truncated, report.num_dropped) == ([[1, 2], [1]], 0, 0)

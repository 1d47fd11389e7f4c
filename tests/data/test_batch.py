"""TokenBatch: collate, rows, widths, and that it is a pytree."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils import _pytree as pytree

from nemorl.data.batch import Example, TokenBatch, check_targets, collate, extents, take, trim
from nemorl.data.packing import pack, segments_apart
from nemorl.losses.logprobs import LogprobKind
from nemorl.parallel.layout import Layout
from tests.data.batches import SPECS, assert_equal, batch_of, built, each_array, tokens_of


def example(*ids: int, **arrays) -> Example:
    trained = [False, *[True] * (len(ids) - 1)]
    return Example(input_ids=ids, loss_mask=trained, response_mask=trained, **arrays)


def test_worked_collate():
    batch = collate(
        [example(5, 6, 7, prev_logprobs=[0.0, -1.0, -2.0]), example(8, prev_logprobs=[0.0])],
        length=4,
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, False], [False] * 4]
    assert batch.prev_logprobs is not None
    assert batch.prev_logprobs.tolist() == [[0.0, -1.0, -2.0, 0.0], [0.0] * 4]
    assert batch.advantages is None
    assert batch.lengths.tolist() == [3, 1]
    assert (batch.num_tokens, len(batch)) == (4, 2)
    assert collate(
        [{"input_ids": [8], "loss_mask": [False], "response_mask": [False]}], length=3
    ).input_ids.tolist() == [[8, 0, 0]]


def test_versions_are_minus_one_where_no_token_is():
    """However a batch is padded, packed, cut."""
    batch = collate(
        [example(5, 6, policy_versions=[-1, 3]), example(8, policy_versions=[2**40])], length=3
    )
    for found, expected in (
        (batch, [[-1, 3, -1], [2**40, -1, -1]]),
        (trim(batch, multiple_of=4), [[-1, 3, -1, -1], [2**40, -1, -1, -1]]),
        (trim(batch), [[-1, 3], [2**40, -1]]),
        (pack(batch, ((0, 1), ())), [[-1, 3, 2**40], [-1] * 3]),
        (segments_apart(pack(batch, ((1, 0),)))[0], [[2**40, -1], [-1, 3]]),
        (Layout(batch, (((),),), None, (2, 1), 3, 2).parts()[0], [[-1, -1]]),
    ):
        versions = found.policy_versions
        assert versions is not None and versions.dtype == torch.int64
        assert versions.tolist() == expected


def test_a_batch_is_a_pytree_with_its_kind():
    batch = collate([example(5, 6)], logprob_kind=LogprobKind(temperature=0.5))
    doubled = pytree.tree_map_only(Tensor, lambda values: torch.cat([values, values]), batch)
    assert isinstance(doubled, TokenBatch)
    assert len(doubled) == 2
    assert doubled.logprob_kind.temperature == 0.5


@given(SPECS)
def test_rows_can_be_taken_apart_and_put_together(spec):
    batch = built(spec)
    rows = [take(batch, [row]) for row in range(len(batch))]
    assert_equal(each_array(lambda *arrays: torch.cat(arrays), *rows), batch)
    backwards = list(range(len(batch)))[::-1]
    assert_equal(take(take(batch, backwards), torch.tensor(backwards)), batch)


@given(SPECS)
def test_widths_change_without_losing_a_token(spec):
    batch = built(spec)
    assert trim(batch).input_ids.shape[1] == int(extents(batch).max()) == max(spec[0])
    assert trim(batch, multiple_of=8).input_ids.shape[1] % 8 == 0
    assert tokens_of(trim(batch)) == tokens_of(batch)


def test_extent_counts_padding_on_the_left():
    shifted = each_array(lambda array: array.roll(1, 1), batch_of([2], width=4))
    assert extents(shifted).tolist() == [3]
    assert trim(shifted).input_ids.tolist() == [[0, 1, 2]]


def test_errors_say_what_is_wrong():
    cases = [
        (
            lambda: Example(input_ids=[1, 2], loss_mask=[False], response_mask=[False, True]),
            "input_ids has 2, loss_mask has 1",
        ),
        (
            lambda: collate([example(1, 2, advantages=[0.0, 1.0]), example(1)]),
            "advantages must be given for all examples or for none: example 1",
        ),
        (
            lambda: collate(
                [example(1), Example(input_ids=[1], loss_mask=[True], response_mask=[True])]
            ),
            r"be False at index 0 .*, unlike that of example 1",
        ),
        (
            lambda: collate(
                [Example(input_ids=[1, 2], loss_mask=[False, True], response_mask=[False, False])]
            ),
            "be a subset of response_mask, unlike that of example 0",
        ),
        (lambda: collate([example(1), example(1, 2)], length=1), "sequence 1 has 2 tokens"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


SOFT: dict[str, Any] = {
    "target_ids": [[0, 0], [7, 8]],
    "target_weights": [[0.0, 0.0], [0.25, 0.75]],
    "teacher_logprobs": [[-math.inf] * 2, [-1.0, -2.0]],
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sum": ({"target_weights": [[0, 0], [0.5, 0.25]]}, r"weights\[0, 1\] must sum to one .*0.25\]"),
    "negative": ({"target_weights": [[0, 0], [1.5, -0.5]]}, "0, 1, 1] must be 0 or more.* -0.5"),
    "nan": ({"target_weights": [[0, math.nan], [0.5, 0.5]]}, r"0, 0, 1\] must be 0 or more.*nan"),
    "no ids": ({"target_ids": None}, r"weights must be .*\(1, 2, 2\).*ids are None"),
    "hard ids": ({"target_ids": [0, 7]}, r"weights must be \[batch, seq, k\]"),
    "negative id": ({"target_ids": [[0, 0], [7, -8]]}, r"ids\[0, 1, 1\] must be a token id,.* -8"),
    "rank": (
        {"target_ids": [[[0]]] * 2, "target_weights": None, "teacher_logprobs": None},
        r"target_ids must be \[batch, seq\(, k\)\]",
    ),
    "teacher": ({"teacher_logprobs": [[0, 0], [0, 0.5]]}, "must be 0 or less, but it is 0.5"),
    "teacher's nan": ({"teacher_logprobs": [[0, 0], [0, math.nan]]}, "must be 0 or less"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_wrong_targets_are_refused(changed: dict[str, Any], message: str):
    collate([example(5, 6, **SOFT)])
    with pytest.raises(ValueError, match=message):
        collate([example(5, 6, **{**SOFT, **changed})])


def test_targets_belong_to_tokens_of_the_model():
    batch = collate([example(5, 6, **SOFT)], length=3)
    check_targets(batch, vocab_size=9)
    for changed, message in (
        ({"target_ids": batch.target_ids + 1}, r"target_ids\[0, 2, 0\] must be 0 on padding"),
        ({"target_weights": batch.target_weights + 1}, "weights.* must be 0 on padding"),
        ({"teacher_logprobs": batch.target_weights * 0}, "teacher.* must be -inf on padding"),
    ):
        with pytest.raises(ValueError, match=message):
            check_targets(replace(batch, **changed))
    with pytest.raises(ValueError, match=r"ids\[0, 1, 1\] must be a token id, 0 … 7, but it is 8"):
        check_targets(batch, vocab_size=8)
    with pytest.raises(ValueError, match=r"target_ids\[1\] must have the shape \(2,\)"):
        collate([example(5, 6, target_ids=SOFT["target_ids"]), example(5, target_ids=[[1]])])


def test_sequences_without_a_token_and_batches_without_a_row():
    empty = Example(input_ids=[], loss_mask=[], response_mask=[])
    batch = collate([empty, empty])
    assert batch.input_ids.shape == (2, 0) and extents(batch).tolist() == [0, 0]
    assert trim(batch).input_ids.shape == (2, 1)
    none = take(batch, [])
    assert len(none) == 0 and trim(none).input_ids.shape == (0, 1)

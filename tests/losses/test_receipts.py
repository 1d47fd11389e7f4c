"""Receipts by hand: what a hash depends on, ratios, and depths in packed rows."""

import math

import pytest
import torch

from nemorl.losses.importance import gap_by_depth, support_ratio, token_hashes, token_receipt
from nemorl.losses.types import finalize

IDS = torch.tensor([[5, 6, 7, 8]])
PLACES = torch.arange(4)[None]
LOGPROBS = torch.tensor([[0.0, -0.5, -0.25, -1.0]])


def test_a_hash_depends_on_all_before_and_on_its_own_logprob_alone():
    whole = token_hashes(IDS, PLACES, LOGPROBS)
    for place in range(4):
        other = IDS.clone()
        other[0, place] += 1
        same = (token_hashes(other, PLACES, LOGPROBS) == whole)[0].tolist()
        assert same == [i < place for i in range(4)]
        logprobs = LOGPROBS.clone()
        logprobs[0, place] = torch.nextafter(logprobs[0, place], torch.tensor(1.0))
        same = (token_hashes(IDS, PLACES, logprobs) == whole)[0].tolist()
        assert same == [i != place for i in range(4)]
    assert ((whole >= 0) & (whole < 2**32)).all()


def test_an_infinite_or_missing_logprob_has_a_hash_too():
    values = [LOGPROBS.clone().index_fill(1, torch.tensor([2]), x) for x in (-math.inf, math.nan)]
    hashes = [int(token_hashes(IDS, PLACES, value)[0, 2]) for value in (LOGPROBS, *values)]
    assert len({*hashes}) == 3


def test_nothing_has_the_sum_0():
    none = torch.zeros(1, 4, dtype=torch.bool)
    found = finalize(token_receipt(IDS, PLACES, LOGPROBS, none))
    assert found == {"receipts/tokens": 0, "receipts/hash": 0}


def test_ratios_by_hand():
    prev = torch.tensor([[0.3, 0.6, 0.5]]).log()
    generation = torch.tensor([[0.6, 0.4, 0.0]]).log()
    found = finalize(support_ratio(prev, generation, torch.ones(1, 3, dtype=torch.bool)))
    assert found["receipts/support_ratio"] == pytest.approx((0.5 + 1.5) / 2)
    assert found["receipts/support_square"] == pytest.approx(0.25)


def test_depths_begin_with_each_response_of_a_packed_row():
    """A prompt of 2 and 5 tokens, of 1 and 4, then padding; an observation counts, untrained."""
    segments = torch.tensor([[1] * 7 + [2] * 5 + [0]])
    response = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
    mask = response.clone()
    mask[0, 3] = False
    gaps = torch.zeros(1, 13)
    gaps[0, 5] = 0.1  # the fourth of the first response
    gaps[0, 10] = 0.2  # the third of the second
    found = finalize(gap_by_depth(gaps, torch.zeros(1, 13), mask, response, segments))

    def kl(gap: float) -> float:
        return math.expm1(gap) - gap

    assert found["receipts/kl_from_1"] == pytest.approx(kl(0.2) / (2 + 3), rel=1e-4)
    assert found["receipts/kl_from_4"] == pytest.approx(kl(0.1) / (2 + 1), rel=1e-4)
    assert [*found] == ["receipts/kl_from_1", "receipts/kl_from_4"]

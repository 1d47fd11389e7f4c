"""Off-policy weights, metrics of the sampler, and receipts by hand."""

import math

import pytest
import torch

from nemorl.losses.importance import (
    LEVELS,
    MODES,
    gap_by_depth,
    importance_weights,
    sampler_gap,
    support_ratio,
    token_hashes,
    token_receipt,
)
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.policy import reinforce
from nemorl.losses.types import finalize

NAN, INF = float("nan"), float("inf")
# Two sequences and padding. Token ratios 1, 4, ¼ | 2, 2; products 1 | 4; geometric means 1 | 2.
RATIOS = torch.tensor([[1.0, 4.0, 0.25, 2.0, 2.0, 9.0]])
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0]])
MASK = torch.tensor([[True, True, True, True, True, False]])


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "expected"),
    [
        ("token", "truncate", 0.5, 3.0, [1, 3, 0.5, 2, 2]),
        ("token", "sequence_mask", 0.5, 1.5, [1, 4, 0.25, 0, 0]),  # survivors keep their weight
        ("sequence", "sequence_mask", 0.0, 3.0, [1, 1, 1, 4, 4]),  # judged by the geometric ratio 2
        ("geometric", "truncate", 0.0, 1.5, [1, 1, 1, 1.5, 1.5]),
        ("geometric", "sequence_mask", 1.5, 3.0, [0, 0, 0, 2, 2]),
    ],
)
def test_by_hand(level, mode, low, high, expected):
    arrays = RATIOS.log() - 3, torch.full_like(RATIOS, -3.0), MASK, SEGMENTS
    weights, _ = importance_weights(*arrays, level=level, mode=mode, min=low, max=high)
    assert weights[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-5)


def test_without_segments_a_row_is_one_sequence():
    weights, _ = importance_weights(
        RATIOS.log(), torch.zeros_like(RATIOS), MASK, level="sequence", max=10.0
    )
    assert weights[0].tolist() == pytest.approx([4, 4, 4, 4, 4, 0], rel=1e-5)


def test_metrics_by_hand():
    _, metrics = importance_weights(
        RATIOS.log(), torch.zeros_like(RATIOS), MASK, SEGMENTS, mode="mask", min=0.5, max=3.0
    )
    assert finalize(metrics) == pytest.approx(
        {
            "importance_ratio_mean": 9.25 / 5,
            "importance_ratio_min": 0.25,
            "importance_ratio_max": 4.0,
            "importance_outside_fraction": 0.4,
            "generation_nonfinite_fraction": 0.0,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_without_a_sampler_logprob_is_dropped_and_counted(level, mode, bad):
    generation = torch.tensor([[0.0, bad, 0.0, 0.0, 0.0, bad]])
    weights, metrics = importance_weights(
        RATIOS.log(), generation, MASK, SEGMENTS, level=level, mode=mode, max=INF
    )
    expected = {
        "token": [1, 0, 0.25, 2, 2],
        "sequence": [0.25, 0, 0.25, 4, 4],
        "geometric": [0.5, 0, 0.5, 2, 2],
    }[level]
    assert weights[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-5)
    missing = finalize(metrics)["generation_nonfinite_fraction"]
    assert missing == pytest.approx(0.2), "the padded one isn't counted"


def test_a_token_without_a_sampler_logprob_drops_no_sequence():
    generation = torch.tensor([[0.0, NAN, 0.0, 0.0, INF, 0.0]])
    bounds = {"extreme_bounds": (0.25, 2.0), "geometric_bounds": (0.25, 2.0)}
    weights, _ = importance_weights(RATIOS.log(), generation, MASK, SEGMENTS, **bounds)
    assert weights[0].tolist() == pytest.approx([1, 0, 0.25, 2, 0, 0], rel=1e-5)


def test_the_trainers_own_nan_is_not_hidden():
    weights, _ = importance_weights(
        torch.tensor([[NAN, 0.0]]), torch.zeros(1, 2), torch.tensor([[True, True]])
    )
    assert weights[0, 0].isnan()
    assert weights[0, 1] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_long_sequences_and_far_policies_stay_finite(level, mode):
    """2,000 tokens with a gap of 0.05 nats each, and ten with 60 nats each."""
    gaps = torch.zeros(2, 2000)
    gaps[0], gaps[1, :10] = 0.05, 60.0
    mask = gaps != 0
    weights, metrics = importance_weights(
        gaps, torch.zeros_like(gaps), mask, level=level, mode=mode, max=INF
    )
    now = gaps.clone().requires_grad_()
    output = reinforce(now, gaps, torch.ones_like(gaps), token_mean_weights(mask), weights)
    measured = {**metrics, **output.metrics, **sampler_gap(gaps, torch.zeros_like(gaps), mask)}
    assert weights.isfinite().all() and output.loss.isfinite()
    assert torch.linalg.vector_norm(torch.autograd.grad(output.loss, now)[0]).isfinite()
    assert all(math.isfinite(value) for value in finalize(measured).values())


def test_sampler_gap_by_hand():
    """Two sequences in a row: one token half as likely and one four times as likely, then one that
    agrees; one that the sampler can't tell of.
    """
    prev = torch.tensor([[0.25, 0.5, 0.5, 0.5, NAN]]).log()
    generation = torch.tensor([[0.5, 0.125, 0.5, 0.0, 0.5]]).log()
    mask = torch.tensor([[True, True, True, True, False]])
    segments = torch.tensor([[1, 1, 2, 2, 2]])
    log2 = math.log(2)
    kl = (0.5 - 1 + log2) + (4 - 1 - 2 * log2)
    expected = {
        "token_mult_prob_error": (2 + 4 + 1) / 3,
        "token_mult_prob_error_max": (2 + 4) / 2,
        "gen_kl_error": kl / 3,
        "gen_kl_error_max": kl / 2,
        "generation_nonfinite_fraction": 1 / 4,
    }
    found = finalize(sampler_gap(prev, generation, mask, segments))
    assert found == pytest.approx(expected, rel=1e-5)
    found = finalize(sampler_gap(prev, generation, mask))  # a row is one sequence
    assert found["token_mult_prob_error_max"] == pytest.approx(7 / 3, rel=1e-5)


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

"""Statistics of judged responses, against brute force and numbers worked out by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.rollout import evaluation
from nemorl.rollout.evaluation import (
    cons_at_k,
    interval,
    mean_by_prompt,
    paired,
    pass_at_k,
    share_interval,
)

outcomes = st.lists(st.booleans(), min_size=1, max_size=7)


@given(outcomes, st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(correct, k):
    if k > len(correct):
        with pytest.raises(ValueError, match="k must be at most the responses per prompt"):
            pass_at_k(correct, [0] * len(correct), k)
        return
    subsets = list(itertools.combinations(correct, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(correct, [0] * len(correct), k) == pytest.approx([expected])


def test_pass_at_k_of_many_responses():
    assert pass_at_k([True] + [False] * 1023, [0] * 1024, 512) == pytest.approx([0.5])


voting = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=9)


@given(voting, st.sampled_from(["a", "b"]))
def test_cons_is_the_expected_correctness_over_every_way_to_break_ties(responses, gold):
    answers = [answer for (answer,) in responses]
    correct = [answer == gold for answer in answers]
    counts = {a: answers.count(a) for a in answers if a is not None}
    winners = [a for a in counts if counts[a] == max(counts.values())]
    expected = sum(a == gold for a in winners) / len(winners) if winners else 0.0
    groups = [5] * len(answers)
    assert cons_at_k(correct, answers, groups, len(answers)) == pytest.approx([expected])
    assert cons_at_k(correct, answers, groups, 1) == pytest.approx(mean_by_prompt(correct, groups))


def test_cons_by_hand():
    answers = ["2", "2", "3", "3", "3", "2", "9"]
    correct = [a == "2" for a in answers]
    # Blocks of 3: 2, 2, 3 votes for 2; 3, 3, 2 for 3; the last response is left out.
    assert cons_at_k(correct, answers, [0] * 7, 3).tolist() == [0.5]
    # Prompts that alternate, and an answer that one of two responses was right with.
    assert cons_at_k([1, 1, 0, 0], ["x", "y", "x", "z"], [0, 1, 0, 1], 2).tolist() == [0.5, 0.5]
    assert cons_at_k([0, 0], [None, None], [0, 0], 2).tolist() == [0.0]


def test_interval_is_clustered_by_prompt():
    """By Miller's clustered standard error, but for the correction (C − 1) / C."""
    values = np.array([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]])
    clustered = math.sqrt((((values - values.mean()).sum(1)) ** 2).sum()) / values.size
    found = interval(values.mean(1)).half_width
    assert found == pytest.approx(1.959964 * clustered * math.sqrt(4 / 3), rel=1e-6)
    assert interval([1.0]).half_width is None


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        rates = rng.beta(2, 2, size=200)  # prompts differ; their mean is 0.5
        found = interval(rng.binomial(4, rates) / 4)
        covered += abs(found.mean - 0.5) <= found.half_width
    assert 0.93 < covered / 1000 < 0.97


@pytest.mark.parametrize(
    ("n", "rate", "answers", "alike"),
    [(10, 0.9, 1, None), (10, 0.97, 1, None), (30, 0.97, 4, 4), (10, 0.03, 4, 4), (100, 0.5, 8, 1)],
)
def test_the_interval_of_a_share_covers_near_its_ends(n, rate, answers, alike):
    """Where 1.96 s / √n covers as little as .27. `alike`: the sum of a beta's parameters."""
    rng = np.random.default_rng(0)
    rates = (
        rng.beta(rate * alike, (1 - rate) * alike, (500, n)) if alike else np.full((500, n), rate)
    )
    ends = [share_interval(values) for values in rng.binomial(answers, rates) / answers]
    assert np.mean([low <= rate <= high for low, high in ends]) >= 0.92
    assert all(0 <= low < high <= 1 for low, high in ends)


def test_the_interval_of_a_share_by_hand():
    """Brown, Cai & DasGupta's CI_W, and of more responses than prompts."""
    z2 = 1.959964**2
    assert share_interval([1.0] * 10) == pytest.approx((10 / (10 + z2), 1))
    assert share_interval([0.0] * 10) == pytest.approx((0, z2 / (10 + z2)))
    four = share_interval([1.0, 0.0] * 50)
    assert four == pytest.approx((0.4038, 0.5962), abs=1e-4)
    # Prompts that are all as hard, so that each of 400 responses tells something of its own.
    low, high = share_interval([0.25, 0.5, 0.5, 0.75] * 25)
    assert high - low == pytest.approx(
        2 * interval([0.25, 0.5, 0.5, 0.75] * 25).half_width, rel=0.01
    )


differences = st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.1, 0.5]), min_size=1, max_size=8)


@given(differences)
def test_the_paired_test_counts_all_signs(values):
    flips = itertools.product([1, -1], repeat=len(values))
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in flips]
    expected = sum(total >= abs(sum(values)) - 1e-9 for total in sums) / len(sums)
    difference, p_value = paired([0.0] * len(values), values)
    assert p_value == pytest.approx(expected)
    swapped, same = paired(values, [0.0] * len(values))
    assert same == pytest.approx(p_value)
    assert swapped.mean == pytest.approx(-difference.mean)


def test_random_signs_agree_with_all_of_them():
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 2, (2, 60)).astype(float)
    second = np.maximum(second, rng.random(60) < 0.2)
    differing = int((first != second).sum())
    assert differing > evaluation.EXACT
    sampled = paired(first, second, seed=1)
    assert sampled == paired(first, second, seed=1)
    # Of differences ±1, an exact binomial test.
    wins = int((second > first).sum())
    tail = sum(math.comb(differing, i) for i in range(max(wins, differing - wins), differing + 1))
    assert sampled[1] == pytest.approx(min(1.0, 2 * tail / 2**differing), abs=0.02)
    assert sampled[1] != paired(first, second, seed=2)[1]


def test_equal_evaluations_do_not_differ():
    assert paired([0.5, 1.0], [0.5, 1.0]) == ((0.0, 0.0), 1.0)


def test_significance_is_seldom_found_where_there_is_none():
    rng = np.random.default_rng(1)
    found = [paired(*rng.binomial(2, 0.5, (2, 10)) / 2)[1] <= 0.05 for _ in range(400)]
    assert np.mean(found) <= 0.08


def test_a_sampled_p_value_is_never_0():
    assert paired([0.0] * 40, [1.0] * 40)[1] == 1 / (1 + evaluation.FLIPS)

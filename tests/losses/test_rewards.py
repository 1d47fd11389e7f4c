"""Reward transforms by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.rewards import (
    informative_groups,
    overlong_penalty,
    scale_rewards,
)


def test_scaling_is_linear_between_the_ends_and_clamped_outside():
    rewards = torch.tensor([-3.0, -1.0, 0.0, 1.0, 7.0])
    assert scale_rewards(
        rewards, source_min=-1.0, source_max=1.0, target_min=0.0, target_max=10.0
    ).tolist() == [0, 0, 5, 10, 10]
    assert scale_rewards(rewards, target_min=1.0, target_max=0.0).tolist() == [
        1,
        1,
        1,
        0,
        0,
    ]  # a cost becomes a reward


def test_an_empty_source_range_is_refused():
    with pytest.raises(ValueError, match=r"source_max must be above source_min, but it is 1.0"):
        scale_rewards(torch.zeros(1), source_min=1.0)


def test_the_overlong_penalty_falls_in_the_buffer_and_then_stays():
    lengths = torch.tensor([0, 79, 80, 85, 95, 99, 100, 101, 10_000])
    expected = [0, 0, 0, -0.5, -1.5, -1.9, -2, -2, -2]
    assert overlong_penalty(
        lengths, max_length=100, buffer=20, penalty=2.0
    ).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer": 0}, "buffer must be"),
        ({"buffer": 11}, "buffer must be"),
        ({"penalty": -1.0}, "penalty must be"),
    ],
)
def test_overlong_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([1]), **{"max_length": 10, "buffer": 5} | options)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 200), st.integers(0, 20))
def test_the_overlong_penalty_never_rises_with_length(buffer, rest, length, more):
    a, b = overlong_penalty(
        torch.tensor([length, length + more]), max_length=buffer + rest, buffer=buffer, penalty=0.5
    ).tolist()
    assert -0.5 <= b <= a <= 0


def test_dynamic_sampling_keeps_whole_groups():
    rewards = torch.tensor([0.0, 0.1, 1.0, 0.1, 0.0, 3.0])
    assert informative_groups(rewards, torch.tensor([4, 2, 4, 2, 4, 9])).tolist() == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=8)
)
def test_a_group_is_informative_when_two_of_its_rewards_differ(rows):
    expected = [any(g == group and r != reward for g, r in rows) for group, reward in rows]
    assert (
        informative_groups(
            torch.tensor([r for _, r in rows]), torch.tensor([g for g, _ in rows])
        ).tolist()
        == expected
    )


def test_the_ends_of_every_range_are_allowed():
    assert overlong_penalty(
        torch.tensor([0, 5, 10]), max_length=10, buffer=10, penalty=1.0
    ).tolist() == [0, -0.5, -1]
    assert overlong_penalty(torch.tensor([10]), max_length=10, buffer=5, penalty=0.0).tolist() == [
        0
    ]

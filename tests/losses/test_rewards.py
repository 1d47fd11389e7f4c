"""Reward transforms by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.advantages import (
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


def test_the_overlong_penalty_falls_in_the_buffer_and_then_stays():
    lengths = torch.tensor([0, 79, 80, 85, 95, 99, 100, 101, 10_000])
    expected = [0, 0, 0, -0.5, -1.5, -1.9, -2, -2, -2]
    assert overlong_penalty(
        lengths, max_length=100, buffer=20, penalty=2.0
    ).tolist() == pytest.approx(expected)


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

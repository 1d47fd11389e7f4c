"""Advantages and rewards by hand, laws 10 and 12, each estimator against its definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.advantages import (
    BASELINES,
    SCALES,
    advantages,
    at_last_token,
    dr_grpo,
    gae,
    gdpo,
    grpo,
    informative_groups,
    length_adaptive_lambda,
    max_rl,
    nemo_grpo,
    opd,
    overlong_penalty,
    pass_at_k,
    reinforce_plus_plus,
    rloo,
    scale_rewards,
    to_tokens,
    whiten,
)

CHOICES = st.tuples(st.sampled_from(BASELINES), st.sampled_from(SCALES))
OF_GROUP = [(b, s) for b in ("group_mean", "leave_one_out", "length_weighted") for s in SCALES]


@st.composite
def batches(draw):
    """Rewards with ties, groups of any size in any order, lengths."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.1, 0.3, 1.0]),
                st.sampled_from([7, -2, 30]),
                st.integers(1, 9),
            ),
            min_size=2,
            max_size=8,
        )
    )
    rewards, groups, lengths = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


def options_of(baseline, lengths, greedy):
    return {"length_weighted": {"lengths": lengths}, "greedy": {"greedy_rewards": greedy}}.get(
        baseline, {}
    )


REWARDS, GROUPS = (
    torch.tensor([1.0, 4.0, 3.0, 4.0, 5.0], dtype=torch.float64),
    torch.tensor([5, 2, 5, 2, 5]),
)


@pytest.mark.parametrize(
    ("scale", "ddof", "expected"),
    [
        ("group_std", 0, [-2 / math.sqrt(8 / 3), 0, 0, 0, 2 / math.sqrt(8 / 3)]),
        ("leave_one_out_std", 0, [-2, 0, 0, 0, 2]),
        ("group_mean", 1, [-2 / 3, 0, 0, 0, 2 / 3]),
        ("batch_std", 1, [-2 / math.sqrt(2.3), 0, 0, 0, 2 / math.sqrt(2.3)]),
    ],
)
def test_scales_by_hand(scale, ddof, expected):
    assert advantages(REWARDS, GROUPS, scale=scale, ddof=ddof).tolist() == pytest.approx(
        expected, rel=2e-6
    )


def test_presets_by_hand():
    rewards, one = torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1, 1, 1])
    assert grpo(rewards, one).tolist() == pytest.approx([-1, 0, 1], rel=1e-6)
    assert rloo(rewards, one).tolist() == [-3, 0, 3]
    assert dr_grpo(rewards, one).tolist() == [-2, 0, 2]
    assert max_rl(rewards, one).tolist() == [-1, 0, 1]
    assert not max_rl(rewards - 3, one).any(), "a mean that is not above 0"
    assert nemo_grpo(rewards, one).tolist() == pytest.approx(
        [-3 / math.sqrt(2), 0, 3 / math.sqrt(2)], rel=1e-6
    )


def test_a_lone_success_is_not_divided_by_the_zero_spread_of_the_others():
    result = nemo_grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([3, 3, 3, 3]))
    assert result.tolist() == pytest.approx([1, *[-1 / 3 / math.sqrt(1 / 3)] * 3], rel=1e-5)


@given(batches(), CHOICES)
def test_against_plain_definitions(batch, choice):
    (rewards, groups, lengths), (baseline, scale) = batch, choice
    greedy = torch.arange(len(rewards), dtype=torch.float64) / 10
    result = advantages(
        rewards, groups, baseline=baseline, scale=scale, **options_of(baseline, lengths, greedy)
    )
    for i, (own, group) in enumerate(zip(rewards, groups, strict=True)):
        members = rewards[groups == group]
        others = rewards[(groups == group) & (torch.arange(len(rewards)) != i)]
        weights = lengths[groups == group]
        taken_over = (
            [members]
            if baseline in ("group_mean", "leave_one_out", "length_weighted")
            or scale.startswith(("group", "leave"))
            else []
        )
        taken_over += [rewards] if baseline == "batch_mean" or scale == "batch_std" else []
        if any(len(values.unique()) == 1 for values in taken_over):
            assert result[i] == 0
            continue
        b = {
            "group_mean": members.mean(),
            "leave_one_out": others.mean(),
            "batch_mean": rewards.mean(),
            "none": torch.tensor(0.0),
            "greedy": greedy[i],
            "length_weighted": (weights * members).sum() / weights.sum(),
        }[baseline]
        spread = {
            "group_std": members,
            "leave_one_out_std": others,
            "batch_std": rewards,
            "none": own[None],
            "group_mean": own[None],
        }[scale]
        sigma = spread.std() + 1e-6 if len(spread.unique()) > 1 else 1.0
        if scale == "group_mean":
            sigma = members.mean()
        assert result[i].item() == pytest.approx(float((own - b) / sigma), rel=1e-9, abs=1e-9), (
            baseline,
            scale,
        )


@given(
    batches(),
    st.integers(-5, 5),
    st.sampled_from([b for b in BASELINES if b not in ("none", "greedy")]),
    st.sampled_from([s for s in SCALES if s != "group_mean"]),
)
def test_law_10_a_shift_of_all_rewards_changes_nothing(batch, shift, baseline, scale):
    rewards, groups, lengths = batch
    options = {"baseline": baseline, "scale": scale, **options_of(baseline, lengths, None)}
    torch.testing.assert_close(
        advantages(rewards + shift, groups, **options),
        advantages(rewards, groups, **options),
        rtol=1e-7,
        atol=1e-9,
    )


@given(
    batches(),
    st.sampled_from([0.5, 2.0, 16.0]),
    st.sampled_from(["group_mean", "batch_mean", "length_weighted"]),
    st.sampled_from(["group_std", "batch_std"]),
)
def test_law_10_a_positive_factor_changes_nothing_with_a_standard_deviation(
    batch, factor, baseline, scale
):
    rewards, groups, lengths = batch
    options = {"baseline": baseline, "scale": scale, **options_of(baseline, lengths, None)}
    torch.testing.assert_close(
        advantages(rewards * factor, groups, **options),
        advantages(rewards, groups, **options),
        rtol=1e-4,
        atol=1e-9,
    )


@given(batches(), st.integers(-5, 5), st.sampled_from([0.5, 2.0, 16.0]), st.integers(1, 4))
def test_law_10_of_pass_at_k_and_max_rl(batch, shift, factor, k):
    rewards, groups, _ = batch
    close = {"rtol": 1e-7, "atol": 1e-9}
    torch.testing.assert_close(
        pass_at_k(factor * rewards + shift, groups, k=k),
        factor * pass_at_k(rewards, groups, k=k),
        **close,
    )
    torch.testing.assert_close(max_rl(rewards * factor, groups), max_rl(rewards, groups), **close)


@given(
    batches(),
    st.sampled_from(
        [
            (b, s)
            for b in ("group_mean", "leave_one_out")
            for s in ("group_std", "batch_std", "none")
        ]
    ),
)
def test_law_12_group_advantages_sum_to_zero(batch, choice):
    rewards, groups, _ = batch
    result = advantages(rewards, groups, baseline=choice[0], scale=choice[1])
    for group in groups.unique():
        assert result[groups == group].sum().item() == pytest.approx(0, abs=1e-7)
        assert max_rl(rewards, groups)[groups == group].sum().item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@given(
    st.sampled_from([0.1, 1 / 3, 0.7, 1e-30, 1e30, -5.1]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(OF_GROUP),
)
def test_law_12_equal_groups_give_exact_zeros(dtype, reward, count, other, choice):
    rewards = torch.tensor([reward] * count + [1.0 * i for i in range(other)], dtype=dtype)
    groups = torch.tensor([7] * count + [3] * other)
    baseline, scale = choice
    result = advantages(
        rewards,
        groups,
        baseline=baseline,
        scale=scale,
        **options_of(baseline, torch.arange(1, len(rewards) + 1), None),
    )
    assert not result[:count].any()
    same = torch.full_like(rewards, reward)
    assert not advantages(same, groups, baseline="batch_mean", scale=scale).any()
    for result in (pass_at_k(rewards, groups, k=2), max_rl(rewards, groups)):
        assert not result[:count].any()
    assert not gdpo(torch.stack([same, same], 1), groups, weights=(1.0, 2.0)).any()


def test_advantages_are_computed_in_float64():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(60, 2, generator=generator), torch.arange(60) // 6
    one = rewards[:, 0]
    for function in (
        advantages,
        nemo_grpo,
        max_rl,
        lambda r, g: pass_at_k(r, g, k=3),
        lambda r, g: whiten(r[:, None], torch.ones_like(g, dtype=torch.bool)[:, None]),
    ):
        assert torch.equal(function(one, groups), function(one.double(), groups).float())
    assert torch.equal(
        gdpo(rewards, groups, weights=(1.0, 0.3)),
        gdpo(rewards.double(), groups, weights=(1.0, 0.3)).float(),
    )


def test_a_deviation_that_is_not_defined_leaves_the_difference_as_it_is():
    rewards, groups = torch.tensor([1.0, 3.0]), torch.tensor([1, 1])
    assert advantages(rewards, groups, ddof=2).tolist() == [-1, 1]


def test_a_deviation_that_rounding_takes_below_zero_is_zero():
    rewards = torch.tensor([1e8, 0.1, 0.10001], dtype=torch.float64)
    assert nemo_grpo(rewards, torch.tensor([1, 1, 1])).isfinite().all()


@given(batches(), st.integers(2, 4))
def test_pass_at_k_is_the_mean_gain_over_all_sets(batch, k):
    rewards, groups, _ = batch
    result = pass_at_k(rewards, groups, k=k)
    for i, group in enumerate(groups):
        others = [j for j in range(len(rewards)) if groups[j] == group and j != i]
        best = [rewards[list(chosen)].max() for chosen in itertools.combinations(others, k - 1)]
        gains = [float((rewards[i] - value).clamp(min=0)) for value in best]
        assert result[i].item() == pytest.approx(
            k * sum(gains) / len(gains) if gains else 0.0, abs=1e-12
        )


def expected_score(estimate, n, p=0.3):
    """E over all 2ⁿ outcomes of mean_i A_i ∇ log π(y_i), for an answer that is right with
    probability p.
    """
    total = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=n):
        rewards = torch.tensor(outcome, dtype=torch.float64)
        score = rewards / p - (1 - rewards) / (1 - p)
        values = estimate(rewards, torch.zeros(n, dtype=torch.long))
        total += math.prod(p if right else 1 - p for right in outcome) * (values * score).mean()
    return float(total)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (4, 3), (4, 4)])
def test_pass_at_k_is_unbiased(n, k):
    """d/dp pass@k = k (1 − p)^(k − 1)."""
    found = expected_score(lambda *arrays: pass_at_k(*arrays, k=k), n)
    assert found == pytest.approx(k * 0.7 ** (k - 1), rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_max_rl_estimates_the_truncated_log_likelihood(n):
    expected = sum(0.7 ** (k - 1) for k in range(1, n))
    assert expected_score(max_rl, n) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("rewards", "groups", "expected"),
    [
        ([1, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2, 2], [1, -1, -1, 1, 0, 0, 0]),
        ([-1, -3, -1, 1], [1, 1, 2, 2], [0, 0, 0, 0]),  # negative rewards
    ],
)
def test_max_rl_by_hand(rewards, groups, expected):
    assert max_rl(torch.tensor(rewards).float(), torch.tensor(groups)).tolist() == expected


def plain_gae(rewards, values, mask, gamma, lam):
    """One sequence, backwards, the observations taken out first."""
    result, advantage, value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
            value, result[t] = values[t], advantage
    return result


@given(
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_gae_is_the_backward_loop_over_the_masked_tokens(seed, batch, seq, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, seq, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, seq, generator=generator) < 0.6
    lams = torch.rand(batch, generator=generator, dtype=torch.float64)
    policy, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, value_lam=lams)
    for row in range(batch):
        arguments = (rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma)
        assert policy[row].tolist() == pytest.approx(plain_gae(*arguments, lam), abs=1e-9)
        expected = [
            a + v if m else 0.0
            for a, v, m in zip(
                plain_gae(*arguments, lams[row].item()), arguments[1], arguments[2], strict=True
            )
        ]
        assert returns[row].tolist() == pytest.approx(expected, abs=1e-9)


def test_length_adaptive_lambda_by_hand():
    found = length_adaptive_lambda(torch.tensor([0, 1, 2]), alpha=2.0)
    assert found.tolist() == [0.5, 0.5, 0.75], "nothing is as short as one token"
    found = length_adaptive_lambda(torch.tensor([0, 1, 20, 100]), alpha=0.1)
    assert found.tolist() == pytest.approx([0, 0, 0.5, 0.9])


def test_reinforce_plus_plus_by_hand():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    kl = torch.tensor([[9.0, 2.0, 1.0], [9.0, 9.0, 0.0]])
    rewards = torch.tensor([2.0, 1.0])
    to_go = torch.tensor([2 - 0.5 * 3, 2 - 0.5 * 1, 1.0])  # 0.5, 1.5, 1
    own = torch.tensor([2 - 0.5 * 2, 2 - 0.5 * 1, 1.0])  # 1, 1.5, 1
    for options, raw in (({}, to_go), ({"kl_to_go": False}, own), ({"ddof": 0}, to_go)):
        expected = (raw - raw.mean()) / raw.std(correction=options.get("ddof", 1))
        result = reinforce_plus_plus(rewards, kl, mask, kl_coef=0.5, **options)
        assert (
            result[mask].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
            and not result[~mask].any()
        )
    # Two groups of unlike spread: the baseline takes the mean away and leaves the spread.
    mask, groups = torch.ones(4, 1, dtype=torch.bool), torch.tensor([1, 1, 2, 2])
    result = reinforce_plus_plus(
        torch.tensor([5.0, 3.0, 12.0, 0.0]), torch.zeros(4, 1), mask, kl_coef=0.5, group_id=groups
    )
    raw = torch.tensor([1.0, -1.0, 6.0, -6.0])
    assert result[:, 0].tolist() == pytest.approx((raw / raw.std()).tolist(), abs=1e-5)


def test_whitening():
    values = torch.tensor([[0.1, 0.1, 5.0], [0.1, 7.0, 0.1]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert not whiten(values, mask).any()
    there = torch.tensor([[True, True, True, False]])
    for value in (0.1, -0.1):
        equal = torch.full((1, 4), value, dtype=torch.float64)
        assert not whiten(equal, there).any() and not whiten(equal, torch.ones_like(there)).any()
    exact = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    assert whiten(exact, torch.ones(1, 3, dtype=torch.bool)).tolist() == [
        pytest.approx([(x - 7 / 3) / (math.sqrt(7 / 3) + 1e-6) for x in (1, 2, 4)], rel=1e-12)
    ]
    assert not whiten(values, torch.zeros_like(mask)).any()
    assert whiten(values[:0], mask[:0]).shape == (0, 3)


def test_token_forms():
    mask = torch.tensor([[False, True, True], [False, False, False]])
    assert to_tokens(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 2, 2], [0, 0, 0]]
    assert at_last_token(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 0, 2], [0, 0, 0]]
    teacher = torch.tensor([[math.nan, -1.0, -2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    result = opd(teacher, torch.tensor([[0.0, -3.0, -1.0], [0.0, 0.0, math.inf]]), mask)
    assert result.tolist() == [[0, 2, -1], [0, 0, 0]] and not result.requires_grad


def test_lengths_of_zero_leave_the_group_mean():
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 2.0]), torch.tensor([1, 1, 2, 2])
    result = advantages(
        rewards,
        groups,
        baseline="length_weighted",
        scale="none",
        lengths=torch.tensor([0, 0, 1, 0]),
    )
    assert result.tolist() == [-1, 1, 0, 2]


def test_gdpo_takes_any_baseline_and_scale():
    components, groups = (
        torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.5, 1.0], [4.0, 4.0]], dtype=torch.float64),
        torch.tensor([1, 1, 1, 2]),
    )
    for baseline, scale in (("group_mean", "group_std"), ("leave_one_out", "none")):
        total = sum(
            w * advantages(components[:, k], groups, baseline=baseline, scale=scale)
            for k, w in enumerate((1.0, 0.5))
        )
        expected = (total - total.mean()) / (total.std() + 1e-6)
        result = gdpo(components, groups, weights=(1.0, 0.5), baseline=baseline, scale=scale)
        assert result.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_scaling_is_linear_between_the_ends_and_clamped_outside():
    rewards = torch.tensor([-3.0, -1.0, 0.0, 1.0, 7.0])
    assert scale_rewards(
        rewards, source_min=-1.0, source_max=1.0, target_min=0.0, target_max=10.0
    ).tolist() == [0, 0, 5, 10, 10]
    cost = scale_rewards(rewards, target_min=1.0, target_max=0.0)  # becomes a reward
    assert cost.tolist() == [1, 1, 1, 0, 0]


def test_the_overlong_penalty_falls_in_the_buffer_and_then_stays():
    lengths = torch.tensor([0, 79, 80, 85, 95, 99, 100, 101, 10_000])
    expected = [0, 0, 0, -0.5, -1.5, -1.9, -2, -2, -2]
    found = overlong_penalty(lengths, max_length=100, buffer=20, penalty=2.0)
    assert found.tolist() == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=8)
)
def test_a_group_is_informative_when_two_of_its_rewards_differ(rows):
    expected = [any(g == group and r != reward for g, r in rows) for group, reward in rows]
    groups, rewards = map(torch.tensor, zip(*rows, strict=True))
    assert informative_groups(rewards, groups).tolist() == expected


def test_the_ends_of_every_range_are_allowed():
    lengths = torch.tensor([0, 5, 10])
    assert overlong_penalty(lengths, max_length=10, buffer=10).tolist() == [0, -0.5, -1]
    assert not overlong_penalty(lengths, max_length=10, buffer=5, penalty=0.0).any()

"""Preference losses: worked examples, and the laws that are theirs alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses import preference
from nemorl.losses.types import finalize

NAN, INF = float("nan"), float("inf")
ONE = torch.ones(1)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def scores(count: int, seed: int, scale: float = 5.0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(6, generator=random, dtype=torch.float64) for _ in range(count)]


class TestSequenceLogprobs:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, NAN], [-8.0, -16.0, INF, -32.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, True]])

    def test_a_row_is_a_sequence(self):
        assert preference.sequence_logprobs(self.logprobs, self.mask).tolist() == [-7.0, -40.0]
        assert preference.sequence_logprobs(
            self.logprobs, self.mask, average=True
        ).tolist() == pytest.approx([-7 / 3, -20.0])

    def test_packed_rows_go_row_by_row(self):
        segments = torch.tensor([[1, 2, 2, 0], [1, 1, 2, 3]])
        summed = preference.sequence_logprobs(self.logprobs, self.mask, segments, num_sequences=5)
        assert summed.tolist() == [-1.0, -6.0, -8.0, 0.0, -32.0]  # the fourth has no masked token
        averaged = preference.sequence_logprobs(
            self.logprobs, self.mask, segments, num_sequences=5, average=True
        )
        assert averaged.tolist() == [-1.0, -3.0, -8.0, 0.0, -32.0]

    def test_padding_is_no_sequence_whatever_the_mask_says(self):
        logprobs = torch.tensor([[-1.0, -2.0, -99.0], [-4.0, -99.0, -99.0]])
        segments = torch.tensor([[1, 2, 0], [1, 0, 0]])
        result = preference.sequence_logprobs(
            logprobs, segments >= 0, segments, num_sequences=3, average=True
        )
        assert result.tolist() == [-1.0, -2.0, -4.0]


# h = (-10 + 12) - (-20 + 16) = 6
PAIR = (one(-10.0), one(-20.0), one(-12.0), one(-16.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -log_sigmoid(0.6)),
        ({"beta": 0.5}, -log_sigmoid(3.0)),
        ({"label_smoothing": 0.1}, -0.9 * log_sigmoid(0.6) - 0.1 * log_sigmoid(-0.6)),
        (
            {"label_smoothing": 0.1, "robust": True},
            (-0.9 * log_sigmoid(0.6) + 0.1 * log_sigmoid(-0.6)) / 0.8,
        ),
        ({"robust": True}, -log_sigmoid(0.6)),
    ],
)
def test_dpo_by_hand(options, expected):
    assert preference.dpo(*PAIR, ONE, **options).loss.item() == pytest.approx(expected, rel=1e-5)


def test_dpo_metrics_and_gradient_by_hand():
    chosen = torch.tensor([-10.0, -5.0, NAN]).requires_grad_()
    rejected, reference = torch.tensor([-20.0, -4.0, NAN]), torch.tensor([-12.0, -5.0, NAN])
    output = preference.dpo(
        chosen,
        rejected,
        reference,
        torch.tensor([-16.0, -5.0, NAN]),
        torch.tensor([0.5, 0.5, 0.0]),
        beta=0.5,
    )
    # βh = 3 and -0.5
    assert output.loss.item() == pytest.approx(
        -0.5 * log_sigmoid(3.0) - 0.5 * log_sigmoid(-0.5), rel=1e-5
    )
    slopes = torch.autograd.grad(output.loss, chosen)[0].tolist()
    assert slopes == pytest.approx(
        [-0.25 / (1 + math.exp(3.0)), -0.25 / (1 + math.exp(-0.5)), 0.0], rel=1e-5
    )
    assert finalize(output.metrics) == pytest.approx(
        {"accuracy": 0.5, "margin": 1.25, "chosen_reward": 0.5, "rejected_reward": -0.75}
    )


@given(st.integers(0, 2**31), st.floats(0.01, 2.0))
def test_dpo_is_antisymmetric_in_the_pair(seed, beta):
    """Law 14: −log σ(−βh) = −log σ(βh) + βh, and margins change sign."""
    chosen, rejected, reference_chosen, reference_rejected = scores(4, seed)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    there = preference.dpo(
        chosen, rejected, reference_chosen, reference_rejected, weights, beta=beta
    )
    back = preference.dpo(
        rejected, chosen, reference_rejected, reference_chosen, weights, beta=beta
    )
    h = (chosen - reference_chosen) - (rejected - reference_rejected)
    torch.testing.assert_close(back.loss - there.loss, beta * h.mean())
    assert finalize(back.metrics)["margin"] == pytest.approx(-finalize(there.metrics)["margin"])
    assert finalize(back.metrics)["accuracy"] == pytest.approx(
        1 - finalize(there.metrics)["accuracy"]
    )


@given(st.integers(0, 2**31), st.floats(0.0, 0.49))
def test_robust_dpo_is_unbiased_under_label_noise(seed, noise):
    """With a share `noise` of the pairs swapped, robust DPO's expectation is plain DPO on the true
    labels.
    """
    pair = scores(4, seed, scale=2.0)
    swapped = [pair[1], pair[0], pair[3], pair[2]]
    weights = torch.ones(6, dtype=torch.float64)
    true, false = (
        preference.dpo(*scores_, weights, label_smoothing=noise, robust=True).loss
        for scores_ in (pair, swapped)
    )
    torch.testing.assert_close(
        (1 - noise) * true + noise * false, preference.dpo(*pair, weights).loss
    )


F_PRIME = {
    "reverse_kl": lambda u: u.log() + 1,
    "forward_kl": lambda u: -1 / u,
    "jensen_shannon": lambda u: (2 * u / (1 + u)).log(),
    0.3: lambda u: (1 - u**-0.3) / 0.3,
}
"""Wang et al. 2023, table 1."""


@pytest.mark.parametrize("divergence", F_PRIME)
def test_dpo_with_a_divergence_is_f_dpo_over_several_steps(divergence):
    """−log σ(β f'(u_c) − β f'(u_r)) of pairs at the reference, moved, and untrained."""
    policy = torch.tensor([[-3.0, -2.0, NAN], [-3.0, -4.0, NAN]], dtype=torch.float64)
    zero, w = torch.full_like(policy[0], -3.0), torch.tensor([0.5, 0.5, 0.0])
    for _ in range(4):
        policy = policy.detach().requires_grad_()
        loss = preference.dpo(*policy, zero, zero, w, beta=0.5, divergence=divergence).loss
        chosen, rejected = F_PRIME[divergence]((policy[:, :2] + 3).exp())
        expected = (1 + (0.5 * (rejected - chosen)).exp()).log().mean()
        slopes = [torch.autograd.grad(each, policy)[0] for each in (loss, expected)]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*slopes)
        policy = policy - slopes[0]


def test_a_policy_far_below_its_reference_keeps_f_dpo_finite():
    chosen, zero = torch.tensor([-900.0, 0.0], requires_grad=True), torch.zeros(2)
    output = preference.dpo(chosen, zero, zero, zero, zero + 1, divergence="forward_kl")
    assert torch.autograd.grad(output.loss, chosen)[0].tolist() == pytest.approx([0.0, -0.05])


@pytest.mark.parametrize(("beta", "expected"), [(0.1, (6 - 5) ** 2), (0.5, (6 - 1) ** 2)])
def test_ipo_by_hand(beta, expected):
    output = preference.ipo(*PAIR, ONE, beta=beta)
    assert output.loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.4), (0.5, 0.0), (-0.1, 1.6)])
def test_hinge_by_hand(beta, expected):
    assert preference.hinge(*PAIR, ONE, beta=beta).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -log_sigmoid(2.0)),  # 2 · 1.5 - 1
        ({"beta": 4.0, "margin": 0.5}, -log_sigmoid(5.5)),
        (
            {"margin": 0.0, "label_smoothing": 0.1},
            -0.9 * log_sigmoid(3.0) - 0.1 * log_sigmoid(-3.0),
        ),
    ],
)
def test_simpo_by_hand(options, expected):
    output = preference.simpo(one(-1.0), one(-2.5), ONE, **options)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


def test_orpo_by_hand():
    # Odds 4 and 1/4: their ratio is 16, σ(log 16) = 16/17.
    for options, coef in (({}, 0.1), ({"coef": 2.0}, 2)):
        loss = preference.orpo(one(0.8).log(), one(0.2).log(), ONE, **options).loss
        assert loss.item() == pytest.approx(coef * math.log(17 / 16), rel=1e-5)


@pytest.mark.parametrize("logprob", [-1e-3, -0.5, -0.69, -0.70, -1.0, -20.0, -90.0])
def test_orpos_log_odds_do_not_cancel(logprob):
    ours = preference._log_odds(one(logprob)).item()
    exact = torch.tensor([logprob], dtype=torch.float32).double().item()
    assert ours == pytest.approx(exact - math.log(-math.expm1(exact)), rel=1e-6, abs=1e-7)


def test_orpo_is_finite_at_probability_one_and_in_masked_pairs():
    chosen = torch.tensor([0.0, NAN, 0.0]).requires_grad_()
    output = preference.orpo(chosen, torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert output.loss.isfinite()
    assert torch.autograd.grad(output.loss, chosen)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("desirable", "kl", "options", "expected"),
    [
        (True, None, {}, 1 / (1 + math.exp(0.5))),  # x = 0.1 · 5: 1 - σ(0.5)
        (False, None, {}, 1 / (1 + math.exp(-0.5))),
        (False, 3.0, {}, 1 / (1 + math.exp(-0.2))),
        (True, -3.0, {}, 1 / (1 + math.exp(0.5))),  # counts as 0
        (True, None, {"beta": 0.2, "desirable_coef": 3.0}, 3 / (1 + math.exp(1.0))),
        (False, None, {"undesirable_coef": 2.0}, 2 / (1 + math.exp(-0.5))),
    ],
)
def test_kto_by_hand(desirable, kl, options, expected):
    baseline = None if kl is None else torch.tensor(kl)
    output = preference.kto(
        one(-1.0), one(-6.0), torch.tensor([desirable]), ONE, baseline, **options
    )
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


def test_kto_metrics_by_hand():
    output = preference.kto(
        torch.tensor([1.0, 3.0, -2.0, NAN]),
        torch.zeros(4),
        torch.tensor([True, True, False, True]),
        torch.tensor([1.0, 1, 1, 0]),
    )
    assert finalize(output.metrics) == pytest.approx(
        {"desirable_reward": 0.2, "undesirable_reward": -0.2, "desirable_fraction": 2 / 3}
    )


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([3.0, 1.0, NAN]).requires_grad_(), torch.tensor([1.0, 2.0, NAN])
    output = preference.bradley_terry(
        chosen, rejected, torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, NAN])
    )
    assert output.loss.item() == pytest.approx(
        -0.5 * log_sigmoid(1.0) - 0.5 * log_sigmoid(-1.0), rel=1e-5
    )
    assert torch.autograd.grad(output.loss, chosen)[0].tolist() == pytest.approx(
        [-0.5 / (1 + math.e), -0.5 / (1 + 1 / math.e), 0.0], rel=1e-5
    )
    assert finalize(output.metrics) == {
        "accuracy": 0.5,
        "margin": 0.5,
        "chosen_reward": 2.0,
        "rejected_reward": 1.5,
        "score_sum_square": 12.5,
    }


def test_centering_draws_scores_to_zero_and_keeps_their_difference():
    both = torch.tensor([[3.0, 1.0, NAN], [1.0, -5.0, NAN]], requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.0])
    plain, centered = (preference.bradley_terry(*both, weights, centering=c).loss for c in (0, 0.1))
    added = centered - plain
    torch.testing.assert_close(added, torch.tensor(0.1 * (8 + 4)))
    # 2 · 0.1 · w · (c + r), the same on both
    expected = torch.tensor([[0.4, -0.2, 0.0]]).expand(2, -1)
    torch.testing.assert_close(torch.autograd.grad(added, both)[0], expected)


@given(st.integers(0, 2**31), st.floats(-50, 50))
def test_bradley_terry_is_shift_invariant(seed, shift):
    """Law 14."""
    chosen, rejected = (x.requires_grad_() for x in scores(2, seed))
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    plain, shifted = (
        preference.bradley_terry(chosen + s, rejected + s, weights).loss for s in (0.0, shift)
    )
    torch.testing.assert_close(shifted, plain)
    for there, here in zip(
        torch.autograd.grad(shifted, [chosen, rejected]),
        torch.autograd.grad(plain, [chosen, rejected]),
        strict=True,
    ):
        torch.testing.assert_close(there, here)


def test_far_apart_pairs_stay_finite():
    chosen = torch.tensor([-1e4, 1e4]).requires_grad_()
    zero = torch.zeros(2)
    for output in (
        preference.dpo(chosen, zero, zero, zero, torch.ones(2), beta=1.0),
        preference.bradley_terry(chosen, zero, torch.ones(2)),
    ):
        assert output.loss.item() == pytest.approx(1e4)
        assert torch.autograd.grad(output.loss, chosen)[0].tolist() == [-1.0, 0.0]


def test_accuracy_counts_the_pairs_with_the_chosen_one_ahead_and_no_ties():
    chosen, rejected = torch.tensor([[1.0, 2.0, 3.0, 5.0, 0.0], [0.0, 1.0, 4.0, 5.0, 9.0]])
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    zero = torch.zeros(5)
    for output, accuracy in (
        (preference.dpo(chosen, rejected, zero, zero, weights), 0.5),
        (preference.bradley_terry(chosen, rejected, weights), 0.5),
        (preference.dpo(chosen, rejected, chosen, rejected, weights), 0),
    ):
        assert finalize(output.metrics)["accuracy"] == accuracy


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        ("dpo", 0.1),
        ("ipo", 0.1),
        ("hinge", 0.1),
        ("simpo", 2.0),
        ("orpo", 0.1),
        ("bradley_terry", 1.0),
    ],
)
def test_rewards_are_reported_in_their_units(loss, scale):
    chosen, rejected = one(-2.0), one(-5.0)
    reference = (one(0.0), one(0.0)) if loss in ("dpo", "ipo", "hinge") else ()
    output = getattr(preference, loss)(chosen, rejected, *reference, ONE)
    found = finalize(output.metrics)
    found.pop("score_sum_square", None)
    assert found == pytest.approx(
        {
            "accuracy": 1.0,
            "margin": 3 * scale,
            "chosen_reward": -2 * scale,
            "rejected_reward": -5 * scale,
        },
        rel=1e-6,
    )

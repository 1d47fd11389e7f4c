"""Policy losses and their optional terms: worked examples, and the laws that are theirs alone."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nemorl.losses import policy
from nemorl.losses.types import LossOutput, finalize

NAN, INF = float("nan"), float("inf")
GSPO_TOKEN = partial(policy.gspo, token_gradient=True)
OF_SEQUENCES = [policy.gspo, GSPO_TOKEN, policy.gmpo]
RATIO_LOSSES = [policy.clipped, policy.cispo, policy.reinforce, policy.sapo, *OF_SEQUENCES]


def ratios(*values: float) -> tuple[Tensor, Tensor]:
    """Current and previous logprobs of one row with these ratios; all previous probabilities are
    0.1.
    """
    prev = torch.full((1, len(values)), 0.1).log()
    return (prev + torch.tensor([values]).log()).requires_grad_(), prev


def apart(loss, count: int) -> dict[str, Tensor]:
    """For the losses with ratios of sequences: that each token is one."""
    sequences = torch.arange(1, count + 1)[None]
    return {"segment_ids": sequences} if loss in OF_SEQUENCES else {}


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def gradient(output: LossOutput, logprobs: Tensor) -> list[float]:
    return torch.autograd.grad(output.loss, logprobs)[0][0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "slope"),
    [
        (1.1, 2.0, {}, -2.2, -2.2),  # inside: -A r, and its derivative by log π is -A r too
        (1.5, 2.0, {}, -2.4, 0.0),  # above with A > 0: -2 · 1.2, no gradient
        (0.5, 2.0, {}, -1.0, -1.0),  # below with A > 0: the pessimistic one is -A r
        (0.5, -2.0, {}, 1.6, 0.0),  # below with A < 0: 2 · 0.8
        (1.5, -2.0, {}, 3.0, 3.0),  # above with A < 0: -A r, unbounded
        (1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0),  # clip-higher
        (0.5, -2.0, {"clip_low": 0.4}, 1.2, 0.0),
        (1.5, 2.0, {"clip_low": 0.0, "clip_high": 0.0}, -2.0, 0.0),  # 0 holds the ratio at 1
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),  # 2 · 3
        (2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0),
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),  # A > 0: dual clip has no say
    ],
)
def test_clipped_by_hand(ratio, advantage, options, loss, slope):
    now, prev = ratios(ratio)
    output = policy.clipped(now, prev, row(advantage), row(1.0), **options)
    assert output.loss.item() == pytest.approx(loss, abs=1e-5)
    assert gradient(output, now) == pytest.approx([slope], abs=1e-5)


@pytest.mark.parametrize("loss", [policy.clipped, policy.cispo, policy.gspo])
def test_bounds_may_differ_from_token_to_token(loss):
    (now, prev), A, ones = ratios(1.5, 0.5, 1.5), row(1.0, -1.0, 1.0), torch.ones(1, 3)
    more = apart(loss, 3)
    low, high = row(0.1, 0.2, 0.3), row(0.4, 0.1, 0.2)
    output = loss(now, prev, A, ones, **more, clip_low=low, clip_high=high)
    first, *rest = (
        loss(now, prev, A, one, **more, clip_low=float(low[0, i]), clip_high=float(high[0, i]))
        for i, one in enumerate(torch.eye(3)[:, None])
    )
    alone = sum(rest, first)
    assert output.loss.item() == pytest.approx(alone.loss.item())
    assert gradient(output, now) == pytest.approx(gradient(alone, now))
    with pytest.raises(ValueError, match="clip_low must be at least 0 at each token"):
        loss(now, prev, A, ones, **more, clip_low=-low, clip_high=high)


def test_clipped_metrics_by_hand():
    now, prev = ratios(1.5, 0.5, 5.0, 0.5, 4.0, 7.0)
    weights = row(0.2, 0.2, 0.2, 0.2, 0.2, 0.0)  # the last one isn't trained
    importance = row(1.0, 0.5, 2.0, 0.0, 1.5, 9.0)
    output = policy.clipped(
        now, prev, row(1.0, -1.0, -1.0, 1.0, 1.0, 1.0), weights, importance, dual_clip=3.0
    )
    # 1 · -1.2, 0.5 · 0.8, 2 · 3, 0, 1.5 · -1.2: a fifth each
    assert output.loss.item() == pytest.approx(0.2 * (-1.2 + 0.4 + 6.0 - 1.8), abs=1e-5)
    logs = [math.log(1.5), math.log(0.5), math.log(5.0), math.log(0.5), math.log(4.0)]
    assert finalize(output.metrics) == pytest.approx(
        {
            "ratio_mean": 2.3,
            "ratio_min": 0.5,
            "ratio_max": 5.0,
            "approx_kl_k1": -sum(logs) / 5,
            "approx_kl_k3": sum(math.exp(x) - 1 - x for x in logs) / 5,
            "clip_fraction_high": 0.4,
            "clip_fraction_low": 0.2,
            "clip_fraction_dual": 0.2,
            "importance_weight_mean": 1.0,
            "importance_weight_max": 2.0,
            "masked_fraction": 0.2,
        },
        abs=1e-5,
    )


@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_importance_weights_multiply_each_token_and_zero_drops_it(loss):
    now, prev = ratios(1.0, 1.0, 1.0)
    options = {"importance_weights": row(2.0, 0.5, 0.0), **apart(loss, 3)}
    output = loss(now, prev, row(1.0, 2.0, 3.0), row(0.5, 0.5, 0.5), **options)
    assert gradient(output, now) == pytest.approx([-1.0, -0.5, 0.0])
    assert finalize(output.metrics)["masked_fraction"] == pytest.approx(1 / 3)


FAR = (torch.full((1, 2), -1.0), torch.tensor([[-1.0, -201.0]]))
"""A token with ratio 1, and one whose ratio e²⁰⁰ float32 cannot hold."""


@pytest.mark.parametrize(
    ("loss", "advantage", "options"),
    [
        *((loss, a, {}) for loss in RATIO_LOSSES[:1] + OF_SEQUENCES for a in (1.0, 0.0)),
        *((loss, -1.0, {"dual_clip": 3.0}) for loss in (policy.clipped, policy.gspo, GSPO_TOKEN)),
        *((policy.sapo, a, {}) for a in (1.0, 0.0, -1.0)),
    ],
)
def test_a_clipped_token_has_gradient_zero_however_far_the_policy_has_moved(
    loss, advantage, options
):
    now, options = FAR[0].clone().requires_grad_(), {**options, **apart(loss, 2)}
    output = loss(now, FAR[1], row(advantage, advantage), row(0.5, 0.5), **options)
    assert output.loss.isfinite() and all(map(math.isfinite, finalize(output.metrics).values()))
    assert gradient(output, now) == [-0.5 * advantage, 0.0]


@pytest.mark.parametrize("gap", [19.0, 60.0, 100.0])
@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_the_gradients_norm_is_finite_however_far_the_policy_has_moved(loss, gap):
    """Also where the policy moved the wrong way, whose ratio `clipped` leaves as it is, and through
    derivatives of the model that make it larger.
    """
    parameter = torch.ones(1, 1000, requires_grad=True)
    now = 1000 * (parameter - 1)
    weights = torch.full_like(now, 1e-3)
    output = loss(now, torch.full_like(now, -gap), torch.full_like(now, -2.0), weights)
    assert output.loss.isfinite()
    assert nn.utils.get_total_norm(torch.autograd.grad(output.loss, parameter)).isfinite()


@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_a_dropped_token_has_neither_loss_nor_gradient_however_far_it_is(loss):
    now = FAR[0].clone().requires_grad_()
    options = {"importance_weights": row(1.0, 0.0), **apart(loss, 2)}
    output = loss(now, FAR[1], row(-1.0, -1.0), row(0.5, 0.5), **options)
    expected = {policy.cispo: -0.5, policy.sapo: 1 / 1.05}.get(loss, 0.5)
    assert output.loss.item() == pytest.approx(expected)
    assert gradient(output, now) == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize("advantage", [2.0, 0.0, -1.0])
def test_reinforce_has_its_gradient_however_far_the_policy_has_moved(advantage):
    now = FAR[0].clone().requires_grad_()
    output = policy.reinforce(
        now, torch.tensor([[-1.0, -INF]]), row(advantage, advantage), row(0.5, 0.5)
    )
    assert gradient(output, now) == [-0.5 * advantage] * 2


def test_gspo_by_hand():
    # Two sequences in a row: s₁ = sqrt(1.21 · 1) = 1.1; s₂ = (8 · 1 · 1)^⅓ = 2, clipped to 1.2. The
    # last slot is padding.
    now, prev = ratios(1.21, 1.0, 8.0, 1.0, 1.0, 3.0)
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    weights = row(0.25, 0.25, 1 / 6, 1 / 6, 1 / 6, 0.0)
    output = policy.gspo(
        now, prev, row(1.0, 1.0, 2.0, 2.0, 2.0, 9.0), weights, segments, clip_low=0.2, clip_high=0.2
    )
    assert output.loss.item() == pytest.approx(0.5 * -1.1 + 0.5 * -2.4, abs=1e-5)
    # d s₁ / d log π_t = s₁ / 2 for each of the two tokens
    assert gradient(output, now) == pytest.approx([-0.275, -0.275, 0.0, 0.0, 0.0, 0.0], abs=1e-5)
    metrics = finalize(output.metrics)
    assert metrics["ratio_mean"] == pytest.approx((2 * 1.1 + 3 * 2) / 5, abs=1e-5)
    assert metrics["clip_fraction_high"] == pytest.approx(0.6)
    assert metrics["approx_kl_k1"] == pytest.approx(-(math.log(1.21) + math.log(8)) / 5, abs=1e-5)


def test_gspo_token_gives_each_token_its_own_advantage():
    now, prev = ratios(1.21, 1.0)
    output = GSPO_TOKEN(now, prev, row(1.0, 3.0), row(0.5, 0.5), clip_low=0.2, clip_high=0.2)
    assert output.loss.item() == pytest.approx(-2.2, abs=1e-5)
    assert gradient(output, now) == pytest.approx([-0.55, -1.65], abs=1e-5)


def test_gmpo_by_hand():
    # Two sequences in a row: s₁ = exp((0.4 − 0.2)/2), s₂ = exp((2 − 0.4 + 0.1)/3); A = 1 and −2.
    now, prev = ratios(*(math.exp(x) for x in (1.0, -0.2, 2.0, -1.0, 0.1)))
    segments, w = torch.tensor([[1, 1, 2, 2, 2]]), row(0.25, 0.25, *[1 / 6] * 3)
    output = policy.gmpo(now, prev, row(1.0, 1.0, -2.0, -2.0, -2.0), w, segments)
    one, two = math.exp(0.1), math.exp(1.7 / 3)
    assert output.loss.item() == pytest.approx(two - one / 2, rel=1e-5)
    # A clipped token has no gradient; the others share their sequence's.
    expected = [0.0, -one / 4, two / 3, 0.0, two / 3]
    assert gradient(output, now) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "factor"),
    [
        (1.5, 2.0, {}, 1.5),
        (8.0, 2.0, {}, 5.0),  # 1 + 4, the default
        (0.1, -2.0, {}, 0.1),  # no lower bound
        (0.1, -2.0, {"clip_low": 0.2}, 0.8),
    ],
)
def test_cispo_by_hand(ratio, advantage, options, factor):
    now, prev = ratios(ratio)
    output = policy.cispo(now, prev, row(advantage), row(1.0), **options)
    assert output.loss.item() == pytest.approx(-advantage * factor * now.item(), abs=1e-4)
    assert gradient(output, now) == pytest.approx([-advantage * factor], abs=1e-5)


def test_cispo_clip_fractions_do_not_depend_on_the_advantage():
    now, prev = ratios(0.5, 2.0, 1.0, 3.0)
    metrics = finalize(
        policy.cispo(
            now, prev, row(1.0, 1.0, 1.0, -1.0), torch.ones(1, 4), clip_low=0.2, clip_high=0.2
        ).metrics
    )
    assert metrics["clip_fraction_low"] == 0.25
    assert metrics["clip_fraction_high"] == 0.5


def test_reinforce_by_hand():
    now, prev = ratios(1.5, 0.5)
    output = policy.reinforce(now, prev, row(2.0, -4.0), row(0.5, 0.5))
    # The value has the ratio, the gradient has not.
    assert output.loss.item() == pytest.approx(0.5 * (-2.0 * 1.5 + 4.0 * 0.5), abs=1e-5)
    assert gradient(output, now) == pytest.approx([-1.0, 2.0])


def batches(spread: float):
    """Ratios up to e^±spread, and weights of which some are 0."""

    @st.composite
    def draw_batch(draw):
        shape = draw(st.integers(1, 3)), draw(st.integers(1, 7))
        random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        options = {"generator": random, "dtype": torch.float64}
        prev = -3 * torch.rand(shape, **options)
        now = prev + spread * (2 * torch.rand(shape, **options) - 1)
        advantages = torch.randn(shape, **options)
        mask = torch.rand(shape, generator=random) < 0.7
        weights = torch.where(mask, torch.rand(shape, **options) + 0.1, 0.0)
        return now.requires_grad_(), prev, advantages, weights

    return draw_batch()


@given(
    batches(0.0),
    st.sampled_from([policy.clipped, policy.cispo, GSPO_TOKEN, policy.sapo]),
    st.sampled_from([0.0, 0.2]),
)
def test_at_ratio_one_every_gradient_is_reinforces(batch, loss, clip):
    """Law 11."""
    now, prev, advantages, weights = batch
    expected = torch.autograd.grad(policy.reinforce(now, prev, advantages, weights).loss, now)[0]
    clips = {} if loss is policy.sapo else {"clip_low": clip, "clip_high": clip}
    torch.testing.assert_close(
        torch.autograd.grad(loss(now, prev, advantages, weights, **clips).loss, now)[0], expected
    )
    assert torch.equal(expected, -advantages * weights)


@given(batches(0.18), st.sampled_from([None, 3.0]))
def test_clip_is_inactive_inside_the_trust_region(batch, dual_clip):
    """Law 11: ratios within e^±0.18 = [0.835, 1.197] are untouched by 0.2."""
    now, prev, advantages, weights = batch
    output = policy.clipped(now, prev, advantages, weights, dual_clip=dual_clip)
    unclipped = policy.clipped(now, prev, advantages, weights, clip_low=1.0, clip_high=1e9)
    assert torch.equal(output.loss, unclipped.loss)
    assert torch.equal(
        torch.autograd.grad(output.loss, now)[0], torch.autograd.grad(unclipped.loss, now)[0]
    )
    metrics = finalize(output.metrics)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


@given(batches(2.0), st.floats(1.01, 4.0))
def test_dual_clip_is_inactive_without_negative_advantages(batch, dual_clip):
    """Law 11."""
    now, prev, advantages, weights = batch
    plain = policy.clipped(now, prev, advantages.abs(), weights)
    dual = policy.clipped(now, prev, advantages.abs(), weights, dual_clip=dual_clip)
    assert torch.equal(plain.loss, dual.loss)
    assert torch.equal(
        torch.autograd.grad(plain.loss, now)[0], torch.autograd.grad(dual.loss, now)[0]
    )


def test_kl_loss_by_hand():
    now, reference = row(0.5, 0.5).log().requires_grad_(), row(0.25, NAN).log()
    output = policy.kl_loss(now, reference, row(1.0, 0.0), coef=0.1)
    assert output.loss.item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2)))  # k3 with d = log ½
    assert gradient(output, now) == pytest.approx([0.1 * (1 - 0.5), 0.0])
    assert finalize(output.metrics) == pytest.approx({"kl": math.log(2) - 0.5})
    output = policy.kl_loss(now, reference, row(1.0, 0.0), coef=0.1, estimator="k1")
    assert output.loss.item() == pytest.approx(0.1 * math.log(2))
    weighted = policy.kl_loss(
        now, reference, row(1.0, 0.0), reference, coef=0.1, gradient="importance"
    )
    assert weighted.loss.item() == pytest.approx(2 * 0.1 * (math.log(2) - 0.5))  # π/π_gen = 2


def test_entropy_bonus_by_hand():
    entropy = row(2.0, 4.0, NAN).requires_grad_()
    output = policy.entropy_bonus(entropy, row(0.5, 0.25, 0.0), coef=0.1)
    assert output.loss.item() == pytest.approx(-0.2)
    assert gradient(output, entropy) == pytest.approx([-0.05, -0.025, 0.0])
    assert finalize(output.metrics) == {"entropy": 3.0}


def test_positive_nll_by_hand():
    now = row(-2.0, -3.0, -4.0, NAN).requires_grad_()
    output = policy.positive_nll(
        now, torch.tensor([[True, False, True, True]]), row(0.25, 0.25, 0.5, 0.0), coef=0.1
    )
    assert output.loss.item() == pytest.approx(0.1 * (0.5 + 2.0))
    assert gradient(output, now) == pytest.approx([-0.025, 0.0, -0.05, 0.0])
    assert finalize(output.metrics) == pytest.approx(
        {"positive_nll": 3.0, "positive_fraction": 2 / 3}
    )


def test_a_ratio_on_the_border_is_not_counted_as_clipped():
    now, prev = ratios(1.0)
    for advantage in (1.0, -1.0):
        for loss in (policy.clipped, policy.cispo):
            output = loss(now, prev, row(advantage), row(1.0), clip_low=0.0, clip_high=0.0)
            metrics = finalize(output.metrics)
            assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
    now = row(2.0).log()
    assert now.exp().item() == 2.0
    for dual_clip, share in ((2.0, 0), (1.5, 1)):
        output = policy.clipped(now, row(0.0), row(-1.0), row(1.0), dual_clip=dual_clip)
        assert finalize(output.metrics)["clip_fraction_dual"] == share


def test_a_dropped_tokens_loss_may_be_infinite():
    now = row(-1.0, -INF).requires_grad_()  # a token that the current policy excludes
    output = policy.cispo(now, row(-1.0, -1.0), row(1.0, 1.0), row(0.5, 0.5), row(1.0, 0.0))
    assert output.loss.item() == pytest.approx(0.5) and gradient(output, now) == [-0.5, 0.0]


def test_without_an_advantage_nothing_counts_as_clipped():
    now, prev = ratios(0.1, 10.0)
    metrics = finalize(
        policy.clipped(now, prev, row(0.0, 0.0), row(0.5, 0.5), dual_clip=2.0).metrics
    )
    assert [metrics[f"clip_fraction_{name}"] for name in ("low", "high", "dual")] == [0, 0, 0]

"""KL by hand, law 13 by exact sums over the vocabulary, and the estimators' gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemorl.losses.kl import DIRECTIONS, divergence, kl

VOCAB = 5
SEEDS = st.integers(0, 2**20)
ALL = torch.ones(1, VOCAB, dtype=torch.bool)
HALF, INSIDE = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()


def two_policies(seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of every token of a small vocabulary under two policies, as a row [1,
    vocab].
    """
    logits = spread * torch.randn(
        2, 1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return tuple(logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)],
)
def test_estimates_where_the_policy_is_twice_as_sure_as_the_reference(estimator, expected):
    logprobs, reference = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.25]]).log()
    result = kl(logprobs, reference, torch.tensor([[True, False]]), estimator=estimator)
    assert result[0, 0].item() == pytest.approx(expected, rel=1e-6)
    assert result[0, 1] == 0


def test_the_clamps():
    far, mask = torch.tensor([[0.0, -50.0]]), torch.tensor([[True, True]])
    for clamps, expected in (
        ({}, 10),
        ({"output_clamp": None}, 20),
        ({"output_clamp": None, "input_clamp": None}, 50),
    ):
        found = kl(far, far.flip(-1), mask, estimator="k1", **clamps)
        assert found.tolist() == [[expected, -expected]]


@given(SEEDS)
def test_law_13_k1_and_k3_are_unbiased_and_k3_is_never_negative(seed):
    logprobs, reference = two_policies(seed)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    k1, k2, k3 = (
        kl(logprobs, reference, ALL, estimator=name, output_clamp=None)
        for name in ("k1", "k2", "k3")
    )
    torch.testing.assert_close((logprobs.exp() * k1).sum(), exact)
    torch.testing.assert_close((logprobs.exp() * k3).sum(), exact)
    assert (k3 >= 0).all() and (k2 >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(SEEDS)
def test_law_13_every_estimate_is_zero_for_the_reference_itself(estimator, seed):
    logprobs, _ = two_policies(seed)
    assert not kl(logprobs, logprobs, ALL, estimator=estimator).any()


def expected_gradient(logits, reference, estimator, gradient):
    """Σ_v π(v) ∇ estimate(v), with the probabilities themselves held fixed: what a sampled batch
    gives on average.
    """
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    generation = logprobs.detach() if gradient == "importance" else None
    estimate = kl(
        logprobs,
        reference,
        ALL,
        estimator=estimator,
        gradient=gradient,
        generation_logprobs=generation,
        output_clamp=None,
    )
    return torch.autograd.grad((logprobs.detach().exp() * estimate).sum(), logits)[0]


@given(SEEDS)
def test_which_gradient_an_estimator_has_on_average(seed):
    logits, reference = two_policies(seed)
    leaf = logits.clone().requires_grad_()
    of_forward, of_reverse = (
        torch.autograd.grad(
            divergence(leaf.log_softmax(-1), reference, direction=name).sum(), leaf
        )[0]
        for name in ("forward", "reverse")
    )
    for estimator, gradient, expected in (
        ("k1", "pathwise", torch.zeros_like(logits)),
        ("k2", "pathwise", of_reverse),
        ("k3", "pathwise", of_forward),
        *((name, how, of_reverse) for name in ("k1", "k3") for how in ("score", "importance")),
    ):
        found = expected_gradient(logits, reference, estimator, gradient)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_both_exclude_changes_neither_value_nor_gradient(direction):
    values = torch.tensor([[0.3, -1.0, 0.2], [1.0, 0.5, -0.7]], dtype=torch.float64)
    wider = torch.nn.functional.pad(values, (0, 1), value=-math.inf).requires_grad_()
    plain = values.clone().requires_grad_()
    expected, result = (
        divergence(*logits.log_softmax(-1), direction=direction) for logits in (plain, wider)
    )
    assert torch.equal(result, expected) and result > 0
    gradient, same = (
        torch.autograd.grad(*pair)[0] for pair in ((result, wider), (expected, plain))
    )
    assert torch.equal(gradient[:, :3], same) and (gradient[:, 3] == 0).all()


def test_the_floor_keeps_reverse_finite_and_leaves_forward_alone():
    for direction, expected in (("reverse", 50 - math.log(2)), ("forward", math.log(2))):
        found = divergence(HALF, INSIDE, direction=direction, floor=-100.0)
        assert found.item() == pytest.approx(expected)


def test_the_ratio_of_the_importance_form_is_clamped_as_well():
    mask, reference = torch.tensor([[True]]), torch.tensor([[-2.0]])
    logprobs, generation = torch.tensor([[-1.0]]), torch.tensor([[-31.0]])
    options = {"estimator": "k1", "gradient": "importance", "generation_logprobs": generation}
    assert kl(logprobs, reference, mask, **options).item() == 10, "and so is the product"
    options["output_clamp"] = None
    for clamp, size in ((20.0, 20), (None, 30)):
        value = kl(logprobs, reference, mask, **options, input_clamp=clamp)
        assert value.item() == pytest.approx(math.exp(size), rel=1e-5)


def test_the_ends_of_mixed_do_not_look_at_the_other_side():
    for student, reference, mix, expected in (
        (INSIDE, HALF, 0.0, math.log(2)),  # forward is infinite
        (HALF, INSIDE, 1.0, math.log(2)),  # reverse is
        (HALF, INSIDE, 0.5, math.inf),
    ):
        found = divergence(student, reference, direction="mixed", mix=mix)
        assert found.item() == pytest.approx(expected)

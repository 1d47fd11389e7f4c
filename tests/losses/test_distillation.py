"""Distillation against the whole distributions, worked examples, and the laws that are its own."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import kl_div

from nemorl.losses.distillation import OUTSIDE, distillation_topk
from nemorl.losses.kl import DIRECTIONS, divergence
from nemorl.losses.types import LossOutput, finalize

NAN, INF = float("nan"), float("inf")
WEIGHTS = torch.tensor([[0.0, 1.0]])
SEEDS = st.integers(0, 2**31)


def distilled(
    logits: Tensor, ids: Tensor, teacher: Tensor, weights: Tensor = WEIGHTS, **options
) -> LossOutput:
    """The loss with what a backend gives of the student's logits, already of token t at index t."""
    log_q = logits.log_softmax(-1)
    inside = torch.zeros_like(log_q).scatter(-1, ids.long(), 1.0) > 0
    entropy = -torch.where(log_q > -INF, log_q.exp() * log_q.clamp(min=-1e9), 0.0).sum(-1)
    rest = torch.where(inside | (log_q == -INF), -INF, log_q).logsumexp(-1)
    found = log_q.gather(-1, ids.long())
    return distillation_topk(found, rest, ids, teacher, weights, entropy=entropy, **options)


def whole(student: Tensor, teacher: Tensor, weights: Tensor, **options) -> LossOutput:
    """With the whole vocabulary as the teacher's tokens."""
    ids = torch.arange(student.shape[-1]).expand_as(student)
    return distilled(student, ids, teacher.log_softmax(-1), weights, **options)


def kl(p: Tensor, q: Tensor) -> Tensor:
    some = p > 0
    a, b = torch.where(some, p, 1.0), torch.where(some, q, 1.0)
    return torch.where(some, a * (a.log() - b.log()), 0.0).sum(-1)


def by_definition(p: Tensor, q: Tensor, direction: str, mix: float = 0.5) -> Tensor:
    middle = mix * p + (1 - mix) * q
    return {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "mixed": lambda: mix * kl(p, q) + (1 - mix) * kl(q, p),
        "jensen_shannon": lambda: mix * kl(p, middle) + (1 - mix) * kl(q, middle),
    }[direction]()


def outcomes(p: Tensor, q: Tensor, inside: Tensor, outside: str) -> tuple[Tensor, Tensor]:
    """The two distributions that are compared, of the whole ones and the teacher's tokens."""
    tops = [torch.where(inside, x, 0.0) for x in (p, q)]
    if outside == "rest_mass":
        rests = [torch.where(inside, 0.0, x).sum(-1, keepdim=True) for x in (p, q)]
        return tuple(torch.cat(pair, -1) for pair in zip(tops, rests, strict=True))
    p, top_q = (top / top.sum(-1, keepdim=True) for top in tops)
    if outside == "renormalize":
        return p, top_q
    return torch.where(inside, p, math.exp(-100)), q


def random_logits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(2, 2, 5, 6, generator=random, dtype=torch.float64)
    weights = torch.rand(2, 5, generator=random, dtype=torch.float64)
    mask = torch.rand(2, 5, generator=random) < 0.7
    return student.requires_grad_(), teacher, torch.where(mask, weights, 0.0)


def assert_same(found: Tensor, expected: Tensor, student: Tensor, **close: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), **close)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, **close)


@pytest.mark.parametrize("outside", OUTSIDE)
@given(
    SEEDS,
    st.sampled_from(DIRECTIONS),
    st.sampled_from([0.5, 0.2]),
    st.sampled_from([1, 3, 6]),
    st.sampled_from([0, 3]),
)
def test_is_the_divergence_of_the_whole_distributions(outside, seed, direction, mix, k, empty):
    """Empty places repeat ids of the top-k, each other's, or name tokens outside."""
    student, teacher, weights = random_logits(seed)
    logprobs, ids = teacher.log_softmax(-1).topk(k, dim=-1)
    inside = torch.zeros_like(teacher).scatter(-1, ids, 1.0) > 0
    fill = torch.randint(6, (2, 5, empty), generator=torch.Generator().manual_seed(seed))
    places = torch.cat([fill, ids], -1)
    logprobs = torch.nn.functional.pad(logprobs, (empty, 0), value=-INF)
    options = {"direction": direction, "mix": mix}
    found = distilled(student, places, logprobs, weights, outside=outside, **options)
    p, q = outcomes(teacher.softmax(-1), student.softmax(-1), inside, outside)
    assert_same(found.loss, (weights * by_definition(p, q, **options)).sum(), student)
    tokens = weights != 0
    for name, whole in (("student_mass", student), ("teacher_mass", teacher)):
        mass = torch.where(inside, whole.softmax(-1), 0.0).sum(-1)[tokens].mean().nan_to_num()
        assert finalize(found.metrics)[name] == pytest.approx(mass.item())


@pytest.mark.parametrize("mix", [0.5, 0.2])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("outside", "p", "q"),
    [
        ("renormalize", [0.625, 0.375], [0.5, 0.5]),
        ("rest_mass", [0.5, 0.3, 0.1 + 0.1], [0.2, 0.2, 0.5 + 0.1]),
        ("zero", [0.625, 0.375, math.exp(-100), math.exp(-100)], [0.2, 0.2, 0.5, 0.1]),
    ],
)
def test_by_hand(outside, p, q, direction, mix):
    # In float64: a divergence near 0 is a difference of larger numbers, which round in float32 by
    # more or less on different CPUs.
    student = torch.tensor([[[NAN] * 4, [0.5, 0.2, 0.1, 0.2]]], dtype=torch.float64).log()
    teacher = torch.tensor([[[NAN, NAN], [0.5, 0.3]]], dtype=torch.float64).log()
    options = {"direction": direction, "mix": mix}
    ids = torch.tensor([[[-7, 99], [1, 3]]]).clamp(0, 3)
    output = distilled(student, ids, teacher, outside=outside, temperature=2.0, **options)
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
    expected = by_definition(*tensors, **options).item()
    assert output.loss.item() == pytest.approx(4 * expected, rel=1e-12), "T² at T = 2"
    assert finalize(output.metrics) == pytest.approx(
        {
            "divergence": expected,
            "student_mass": 0.4,
            "teacher_mass": 0.8,
            "topk_top1_agreement": 1.0,
        }
    )


def generalized_jsd(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """`GKDTrainer.generalized_jsd_loss` of TRL."""
    kl = partial(kl_div, reduction="sum", log_target=True)
    if beta in (0, 1):
        return kl(log_p, log_q) if beta else kl(log_q, log_p)
    both = torch.stack([log_q + math.log1p(-beta), log_p + math.log(beta)])
    middle = torch.logsumexp(both, dim=0)
    return beta * kl(middle, log_p) + (1 - beta) * kl(middle, log_q)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(
    ("beta", "direction"), [(0.0, "forward"), (0.3, "jensen_shannon"), (1.0, "reverse")]
)
def test_the_whole_vocabulary_gives_trls_generalized_jsd(beta, direction, outside):
    student, teacher, _ = random_logits(0)
    weights = torch.ones(2, 5, dtype=torch.float64)
    options = {"direction": direction, "mix": beta, "outside": outside}
    expected = generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    assert_same(whole(student, teacher, weights, **options).loss, expected, student)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.75, 0.25, 0.0], [0.5, 0.5, 0.0]),  # a token that nobody can say (a padded vocabulary)
        ([0.75, 0.25, 0.0], [0.25, 0.25, 0.5]),  # one that the teacher never says
        ([0.25, 0.25, 0.5], [0.75, 0.25, 0.0]),  # one that the student never says
        ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
    ],
)
def test_zero_times_its_logarithm_is_zero(direction, p, q):
    p, q = torch.tensor(p), torch.tensor(q)
    log_q = q.log().requires_grad_()
    found = divergence(log_q, p.log(), direction=direction)
    torch.testing.assert_close(found, by_definition(p, q, direction))
    if found.isfinite():
        assert torch.autograd.grad(found, log_q)[0].isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_probability_that_underflows_is_zero(direction):
    student = torch.tensor([[[0.0] * 3, [0.0, -300.0, -INF]]]).requires_grad_()
    teacher = torch.tensor([[[0.0] * 3, [0.0, -INF, -300.0]]])
    loss = whole(student, teacher, WEIGHTS, direction=direction, outside="zero").loss
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


@given(SEEDS, st.sampled_from(OUTSIDE))
def test_the_ends_of_mixed_are_forward_and_reverse(seed, outside):
    """Law 14, to the last bit."""
    student, teacher, weights = random_logits(seed)
    logprobs, ids = teacher.log_softmax(-1).topk(3)
    for mix, direction in ((1.0, "forward"), (0.0, "reverse")):
        arrays, options = (student, ids, logprobs, weights), {"outside": outside}
        end = distilled(*arrays, direction="mixed", mix=mix, **options).loss
        pure = distilled(*arrays, direction=direction, **options).loss
        assert_same(end, pure, student, rtol=0, atol=0)


@given(SEEDS, st.sampled_from(DIRECTIONS), st.sampled_from(["renormalize", "rest_mass"]))
def test_divergences_are_positive_and_zero_with_zero_gradient_at_the_teacher(
    seed, direction, outside
):
    student, teacher, weights = random_logits(seed)
    options = {"direction": direction, "outside": outside}
    logprobs, ids = teacher.log_softmax(-1).topk(3)
    assert distilled(student, ids, logprobs, weights, **options).loss >= -1e-12
    logprobs, ids = student.detach().log_softmax(-1).topk(3)
    same = distilled(student, ids, logprobs, weights, **options)
    assert (
        same.loss.abs() < 1e-12 and torch.autograd.grad(same.loss, student)[0].abs().max() < 1e-12
    )
    assert finalize(same.metrics)["topk_top1_agreement"] == float(weights.any())


def same_value_and_gradient(
    log_p: list[float], expected: Callable[[Tensor], Tensor], direction: str
) -> None:
    """As a function of the student, in float32 and float64, rest_mass is what is expected."""
    for dtype, close in {
        torch.float32: {"rtol": 1e-5, "atol": 1e-6},
        torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    }.items():
        student = torch.tensor([[[0.0] * 4, [3.0, 1.0, -1.0, 0.5]]], dtype=dtype).requires_grad_()
        logprobs = torch.tensor([[[NAN, NAN], log_p]], dtype=dtype)
        ids = torch.tensor([[[0, 0], [0, 1]]])
        found = distilled(student, ids, logprobs, direction=direction, outside="rest_mass").loss
        q = student[0, 1].double().softmax(-1)
        q = torch.stack([q[0], q[1], q[2:].sum()])
        assert_same(found, expected(q), student, **close)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rest", [1e-30, 1e-12, 1e-8, 1e-7, 1e-5, 0.1, 0.9])
def test_a_rest_of_any_size_counts(rest, direction):
    """With a second token that is 20 times less likely than all others."""
    p = torch.tensor([1 - 1.05 * rest, 0.05 * rest, rest], dtype=torch.float64)
    top = [math.log1p(-1.05 * rest), math.log(0.05 * rest)]
    same_value_and_gradient(top, lambda q: by_definition(p, q, direction), direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("top", [[0.0, -50.0], [math.log(0.75), math.log(0.25)]])
def test_a_rest_that_rounding_hides_is_finite(top, direction):
    """Nothing in forward and Jensen-Shannon, e^-16 in reverse."""

    def expected(q: Tensor) -> Tensor:
        none, hidden = (
            torch.tensor([*top, rest], dtype=torch.float64).exp() for rest in (-INF, -16.0)
        )
        if direction == "mixed":
            return (kl(none, q) + kl(q, hidden)) / 2
        return by_definition(hidden if direction == "reverse" else none, q, direction)

    same_value_and_gradient(top, expected, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_student_with_excluded_tokens_stays_finite(direction, outside):
    student = torch.tensor([[[0.0] * 4, [1.0, 0.5, -INF, -INF]]]).requires_grad_()
    ids, logprobs = torch.tensor([[[0, 1]] * 2]), torch.tensor([[[NAN] * 2, [0.75, 0.25]]]).log()
    loss = distilled(student, ids, logprobs, direction=direction, outside=outside).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, student)[0].isfinite().all()

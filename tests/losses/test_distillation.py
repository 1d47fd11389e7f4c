"""Distillation: worked examples of every direction and option, and the laws that are its own."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemorl.losses.distillation import OUTSIDE, distillation, distillation_topk
from nemorl.losses.kl import DIRECTIONS
from nemorl.losses.types import finalize

NAN, INF = float("nan"), float("inf")
P, Q = [0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]


def kl(p: list[float], q: list[float]) -> float:
    terms = zip(p, q, strict=True)
    return sum(a * math.log(a / b) if b else INF for a, b in terms if a > 0)


def blend(p: list[float], q: list[float], mix: float) -> list[float]:
    return [mix * a + (1 - mix) * b for a, b in zip(p, q, strict=True)]


def by_hand(p: list[float], q: list[float], direction: str, mix: float) -> float:
    if direction == "forward":
        return kl(p, q)
    if direction == "reverse":
        return kl(q, p)
    if direction == "mixed":
        return mix * kl(p, q) + (1 - mix) * kl(q, p)
    return mix * kl(p, blend(p, q, mix)) + (1 - mix) * kl(q, blend(p, q, mix))


def logits(*rows: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of one sequence, a row a position, each with a constant that softmax ignores."""
    values = torch.tensor([rows], dtype=dtype).log()
    return (values + torch.arange(len(rows))[None, :, None]).requires_grad_()


WEIGHTS = torch.tensor([[0.0, 1.0]])  # the loss at token 1 is that of the logits at position 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mix", [0.5, 0.2])
def test_by_hand(direction, mix):
    p, q = [0.7, 0.1, 0.2], [0.2, 0.3, 0.5]
    output = distillation(logits(q, p), logits(p, q), WEIGHTS, direction=direction, mix=mix)
    assert output.loss.item() == pytest.approx(by_hand(p, q, direction, mix), abs=1e-6)
    assert finalize(output.metrics) == pytest.approx(
        {"divergence": by_hand(p, q, direction, mix), "top1_agreement": 0.0}, abs=1e-6
    )


def test_forward_gradient_is_q_minus_p():
    student = logits(Q, Q)
    output = distillation(student, logits(P, P), torch.tensor([[0.0, 0.5]]))
    gradient = torch.autograd.grad(output.loss, student)[0]
    torch.testing.assert_close(gradient[0, 0], 0.5 * (torch.tensor(Q) - torch.tensor(P)))
    assert torch.equal(gradient[0, 1], torch.zeros(4))  # the last position predicts nothing


def test_temperature_flattens_both_and_is_squared():
    p, q = [0.8, 0.2], [0.5, 0.5]  # at T = 2: odds 4 become 2
    output = distillation(logits(q, q), logits(p, p), WEIGHTS, temperature=2.0)
    assert output.loss.item() == pytest.approx(4 * kl([2 / 3, 1 / 3], q), abs=1e-5)
    assert finalize(output.metrics)["divergence"] == pytest.approx(kl([2 / 3, 1 / 3], q), abs=1e-5)


def test_top1_agreement():
    student = logits(P, Q, [0.1, 0.9, 0.0, 0.0], Q)
    teacher = logits(P, Q, [0.9, 0.1, 0.0, 0.0], Q)
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    output = distillation(student, teacher, weights, direction="jensen_shannon")
    assert finalize(output.metrics)["top1_agreement"] == 0.5


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
    student = logits(q, q)
    output = distillation(student, logits(p, p), WEIGHTS, direction=direction)
    assert output.loss.item() == pytest.approx(by_hand(p, q, direction, 0.5), abs=1e-6)
    if output.loss.isfinite():
        assert torch.autograd.grad(output.loss, student)[0].isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_probability_that_underflows_is_zero(direction):
    student = torch.tensor([[[0.0, -300.0, -INF], [0.0, 0.0, 0.0]]]).requires_grad_()
    teacher = torch.tensor([[[0.0, -INF, -300.0], [0.0, 0.0, 0.0]]])
    output = distillation(student, teacher, WEIGHTS, direction=direction)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.autograd.grad(output.loss, student)[0].isfinite().all()


def random_logits(seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    student, teacher = (
        scale * torch.randn(2, 5, 6, generator=random, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.rand(2, 5, generator=random) < 0.7
    mask[:, 0] = False
    return (
        student.requires_grad_(),
        teacher,
        torch.where(mask, torch.rand(2, 5, generator=random, dtype=torch.float64), 0.0),
    )


@given(st.integers(0, 2**31))
def test_the_ends_of_mixed_are_forward_and_reverse(seed):
    """Law 14, to the last bit."""
    student, teacher, weights = random_logits(seed)
    for mix, direction in ((1.0, "forward"), (0.0, "reverse")):
        end = distillation(student, teacher, weights, direction="mixed", mix=mix).loss
        pure = distillation(student, teacher, weights, direction=direction).loss
        assert torch.equal(end, pure)
        assert torch.equal(*(torch.autograd.grad(loss, student)[0] for loss in (end, pure)))


@given(st.integers(0, 2**31), st.sampled_from(DIRECTIONS), st.sampled_from([0.5, 1.0, 4.0]))
def test_divergences_are_positive_and_zero_with_zero_gradient_at_the_teacher(
    seed, direction, temperature
):
    student, teacher, weights = random_logits(seed)
    options = {"direction": direction, "temperature": temperature}
    assert distillation(student, teacher, weights, **options).loss >= -1e-12
    same = distillation(student, student.detach() + 1, weights, **options).loss
    assert same.abs() < 1e-12
    assert torch.autograd.grad(same, student)[0].abs().max() < 1e-12


def topk(teacher: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The teacher's top-k as the token convention has it: index t is about token t."""
    logprobs, ids = (teacher / temperature).log_softmax(-1).topk(k, dim=-1)
    first = torch.full_like(logprobs[:, :1], NAN), torch.full_like(ids[:, :1], -1)
    return torch.cat([first[0], logprobs[:, :-1]], 1), torch.cat([first[1], ids[:, :-1]], 1)


TOP_P, TOP_Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]  # the two most likely of the teacher


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
def test_topk_by_hand(outside, p, q, direction, mix):
    # In float64: a divergence near 0 is a difference of larger numbers, which round in float32 by
    # more or less on different CPUs.
    teacher = logits([0.1, 0.5, 0.1, 0.3], Q, dtype=torch.float64)
    student = logits([0.5, 0.2, 0.1, 0.2], Q, dtype=torch.float64)
    output = distillation_topk(
        student, *topk(teacher.detach(), 2), WEIGHTS, direction=direction, mix=mix, outside=outside
    )
    assert output.loss.item() == pytest.approx(by_hand(p, q, direction, mix), rel=1e-12)
    assert finalize(output.metrics)["top1_agreement"] == 0.0


def by_definition(student: Tensor, log_p: list[float], direction: str) -> Tensor:
    """D in float64 of the outcomes 0, 1 and all others, of which -inf adds nothing to forward."""
    q, teacher = student[0, 0].double().softmax(-1), torch.tensor(log_p, dtype=torch.float64)
    log_q = torch.stack([q[0], q[1], q[2:].sum()]).log()
    middle = torch.logaddexp(teacher, log_q) - math.log(2)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        some = one > -INF
        return (one.exp()[some] * (one - other)[some]).sum()

    return {
        "forward": lambda: kl(teacher, log_q),
        "reverse": lambda: kl(log_q, teacher),
        "mixed": lambda: (kl(teacher, log_q) + kl(log_q, teacher)) / 2,
        "jensen_shannon": lambda: (kl(teacher, middle) + kl(log_q, middle)) / 2,
    }[direction]()


def same_value_and_gradient(
    log_p: list[float], expected: Callable[[Tensor], Tensor], direction: str
) -> None:
    """As a function of the student, in float32 and float64, rest_mass is what is expected."""
    for dtype, close in {
        torch.float32: {"rtol": 1e-5, "atol": 1e-6},
        torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    }.items():
        student = torch.tensor([[[3.0, 1.0, -1.0, 0.5], [0.0] * 4]], dtype=dtype).requires_grad_()
        logprobs = torch.tensor([[[NAN, NAN], log_p]], dtype=dtype)
        ids = torch.tensor([[[0, 0], [0, 1]]])
        options = {"direction": direction, "outside": "rest_mass"}
        found = distillation_topk(student, logprobs, ids, WEIGHTS, **options).loss
        wanted = expected(student)
        torch.testing.assert_close(found.double(), wanted, **close)
        gradients = [torch.autograd.grad(loss, student)[0] for loss in (found, wanted)]
        torch.testing.assert_close(*gradients, **close)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rest", [1e-30, 1e-12, 1e-8, 1e-7, 1e-5, 0.1, 0.9])
def test_a_rest_of_any_size_counts(rest, direction):
    """With a second token that is 20 times less likely than all others."""
    top = [math.log1p(-1.05 * rest), math.log(0.05 * rest)]
    log_p = [*top, math.log(rest)]
    same_value_and_gradient(top, lambda x: by_definition(x, log_p, direction), direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("top", [[0.0, -50.0], [math.log(0.75), math.log(0.25)]])
def test_a_rest_that_rounding_hides_is_finite(top, direction):
    """Nothing in forward and Jensen-Shannon, e^-16 in reverse."""

    def expected(student: Tensor) -> Tensor:
        forward, reverse, half = (
            by_definition(student, [*top, rest], name)
            for name, rest in (("forward", -INF), ("reverse", -16.0), ("jensen_shannon", -INF))
        )
        return {
            "forward": forward,
            "reverse": reverse,
            "mixed": (forward + reverse) / 2,
            "jensen_shannon": half,
        }[direction]

    same_value_and_gradient(top, expected, direction)


@given(
    st.integers(0, 2**31),
    st.sampled_from(DIRECTIONS),
    st.sampled_from(OUTSIDE),
    st.sampled_from([1.0, 2.0]),
)
def test_with_the_whole_vocabulary_topk_is_distillation(seed, direction, outside, temperature):
    student, teacher, weights = random_logits(seed)
    options = {"direction": direction, "temperature": temperature}
    whole = distillation(student, teacher, weights, **options).loss
    top = topk(teacher, 6, temperature)
    part = distillation_topk(student, *top, weights, outside=outside, **options).loss
    torch.testing.assert_close(part, whole)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (part, whole)]
    torch.testing.assert_close(*gradients)


@given(st.integers(0, 2**31), st.sampled_from(DIRECTIONS), st.sampled_from(OUTSIDE))
def test_empty_places_of_the_topk_change_nothing(seed, direction, outside):
    """Also where their id, 0, is a real member."""
    student, teacher, weights = random_logits(seed)
    logprobs, ids = topk(teacher, 3)
    padded = (
        torch.cat([logprobs, torch.full_like(logprobs, -INF)], -1),
        torch.cat([ids, torch.zeros_like(ids)], -1),
    )
    options = {"direction": direction, "outside": outside}
    short, long = (
        distillation_topk(student, *given_, weights, **options).loss
        for given_ in ((logprobs, ids), padded)
    )
    torch.testing.assert_close(long, short)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (short, long)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_student_with_excluded_tokens_stays_finite(direction, outside):
    student = torch.tensor([[[1.0, 0.5, -INF, -INF], [0.0, 0.0, 0.0, 0.0]]]).requires_grad_()
    logprobs = torch.tensor([[[NAN, NAN], [0.75, 0.25]]]).log()
    ids, options = torch.tensor([[[-7, 99], [0, 1]]]), {"direction": direction, "outside": outside}
    loss = distillation_topk(student, logprobs, ids, WEIGHTS, **options).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


@pytest.mark.parametrize("outside", OUTSIDE)
def test_topk_of_other_types_and_its_agreement(outside):
    """Ids of 16 bits, a float32 teacher of a float64 student."""
    student = torch.tensor(
        [[[0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]], dtype=torch.float64
    ).log()
    logprobs = torch.tensor([[[0.5, 0.5], [0.3, 0.6], [0.3, 0.6], [0.3, 0.6]]]).log()
    ids = torch.tensor([[[0, 1]] * 4])
    weights = torch.tensor([[0.0, 0.25, 0.25, 0.5]])
    output = distillation_topk(student, logprobs, ids.short(), weights, outside=outside)
    exact = distillation_topk(student, logprobs.double(), ids, weights, outside=outside).loss
    assert output.loss.dtype == torch.float64
    assert output.loss.item() == pytest.approx(exact.item(), rel=1e-5)
    assert finalize(output.metrics)["top1_agreement"] == pytest.approx(2 / 3)

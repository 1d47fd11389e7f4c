"""A representative part of the matrix, and negative controls; `make parity` runs all of it."""

import math
import re

import pytest
import torch

from tests.parallel.parity import golden
from tests.parallel.parity.cases import (
    CONTROLS,
    LAYOUTS,
    PLANS,
    QUICK,
    Case,
    matrix,
    subset,
)
from tests.parallel.parity.compare import LIMITS, verdict
from tests.parallel.parity.golden import LOSSES, Problem, golden_batch
from tests.parallel.parity.reference import reference
from tests.parallel.parity.run import chunks, run_chunk
from tests.parallel.parity.table import summary
from tests.tiny_models import EXPERTS, KINDS


def together(quick: tuple[Case, ...], rest: tuple[Case, ...]) -> list:
    return [
        pytest.param(
            chunk, id=f"{chunk[0].ranks} ranks{kind}{' compiled' * chunk[0].compile}", marks=marks
        )
        for cases, kind, marks in ((quick, "", ()), (rest, ", more", pytest.mark.slow))
        for chunk in chunks(cases)
    ]


FAST = tuple(
    case
    for case in QUICK
    if case.plan in ("one process", "FSDP2 2", "TP 2 + SP", "megatron PP 2") and not case.varlen
)


@pytest.mark.slow_cases("0 ranks")
@pytest.mark.parametrize(
    "chunk", together(FAST, tuple(case for case in subset() if case not in FAST))
)
def test_every_plan_gives_the_same_numbers(chunk: list[Case]):
    verdicts = {
        str(case): verdict(case, errors)
        for case, errors in zip(chunk, run_chunk(chunk), strict=True)
    }
    assert {case: words for case, (right, words) in verdicts.items() if not right} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "layout", "recomputed"),
    [
        ("one process", "packed", "none"),
        ("one process", "packed", "full"),
        ("one process", "token budget", "none"),
        ("megatron 1", "packed", "none"),
    ],
)
def test_a_gpu_gives_the_same_numbers(
    plan: str, layout: str, recomputed: str, accelerator: torch.device
):
    if plan.startswith("megatron"):
        pytest.importorskip("megatron.core")
    case = Case(
        plan=plan,
        layout=layout,
        problem=Problem(loss="nll", dtype="bfloat16"),
        activation_checkpointing=recomputed,
        varlen=True,
    )
    assert verdict(case, run_chunk([case], accelerator.type)[0]) == (True, "")


FORWARD = ("the packed mask", "which prompts are the same", "the sampler's experts")
"""What also spoils logprobs."""


@pytest.mark.parametrize("chunk", together((), CONTROLS))
def test_what_is_broken_on_purpose_is_found(chunk: list[Case]):
    for case, errors in zip(chunk, run_chunk(chunk), strict=True):
        assert verdict(case, errors)[0], f"{case} was not noticed: {errors}"
        if case.sabotage == "the tied weight":
            assert isinstance(errors, str) and re.search(
                r"gradients are of other parameters: .*lm_head\.weight", errors
            )
        else:
            assert isinstance(errors, dict) and errors["gradient"] > 1e4 * LIMITS["gradient"]
            # What spoils gradients alone leaves the logprobs right, which is why more than those
            # has to be looked at.
            assert (errors["logprobs"] > LIMITS["logprobs"]) == (case.sabotage in FORWARD)


def test_only_what_is_right_passes():
    case, control, fine = Case(plan="FSDP2 2"), CONTROLS[0], dict.fromkeys(LIMITS, 1e-7)
    assert verdict(case, fine) == (True, "") and not verdict(control, fine)[0]
    for wrong in (2e-6, math.nan, math.inf):
        found = fine | {"gradient": wrong}
        assert not verdict(case, found)[0] and verdict(control, found)[0]
    assert verdict(case, fine | {"loss": 2e-6}) == (False, "loss 2.0e-06 > 1.0e-06")
    assert not any(verdict(each, "AssertionError: rank 1 died")[0] for each in (case, control))


def test_the_subset_has_everything_once():
    assert {case.layout for case in QUICK} > set(LAYOUTS) - {"padded"}
    assert {case.plan for case in subset()} == set(PLANS) and len(subset()) >= 200
    assert {case.layout for case in subset()} == set(LAYOUTS)
    assert {case.problem.loss for case in subset()} == set(LOSSES)
    assert {case.problem.model for case in subset()} == KINDS.keys() | EXPERTS.keys()
    assert {case.activation_checkpointing for case in subset()} == {"none", "selective", "full"}
    for cases in (matrix(), subset()):
        assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(),
        Problem(loss="pairs"),
        Problem(logprobs="filtered"),
        Problem(layers=4),
        Problem(model="qwen3_moe"),
        Problem(model="mixtral", replay=True),
    ],
    ids=str,
)
def test_the_golden_batch_is_one_that_shows_something(problem: Problem):
    """Ratios on both sides of the clip but none at its border; a gradient for every parameter."""
    batch, exact = golden_batch(problem), reference(problem)
    for values in (exact.logprobs, exact.after):
        ratio = (values - batch.prev_logprobs)[batch.loss_mask].exp()
        assert 0.02 < ((ratio < 0.8) | (ratio > 1.28)).float().mean() < 0.9
        assert min(float((ratio - border).abs().min()) for border in (0.8, 1.28, 3.0)) > 1e-5
    assert all(0.001 < gradient.abs().max() < 1 for gradient in exact.gradients.values())
    assert min(exact.grad_norms) > 0.5
    assert (exact.after - exact.logprobs).abs().max() > 0.1


def test_the_reference_is_what_the_losses_say():
    plain, filtered = reference(Problem()), reference(Problem(logprobs="filtered"))
    assert golden.KINDS["filtered"].filtered and filtered.entropy.sum() < plain.entropy.sum()
    assert not torch.equal(plain.logprobs, filtered.logprobs)


def test_the_table_shows_the_worst():
    case, other = Case(plan="FSDP2 2"), Case(plan="FSDP2 2", layout="packed")
    fine = dict.fromkeys(LIMITS, 1e-8)
    results = {str(case): fine, str(other): fine | {"loss": 3.21e-7}}
    lines = summary([case, other], results).splitlines()
    assert lines[0].startswith(f"2 of 2 cases ({len(matrix())} in all) give the reference's num")
    assert "| dtensor, float32 | 2 | 1.0e-08 (of 2.0e-06) |" in lines[-1]
    assert "3.2e-07 (of 1.0e-06)" in lines[-1]

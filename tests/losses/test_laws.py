"""Every law on every case, in derandomised examples.

What a case cannot have is in `EXCEPTIONS`, and is tried as well: an exception that holds after all
is stale.
"""

import ast
import importlib
import inspect
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, is_hypothesis_test, seed, settings
from torch.utils import _pytree as pytree

from nemorl import losses
from tests.helpers import arrays_in, lay_out, shapes_checked
from tests.losses import cases
from tests.losses.cases import CASES, EXCEPTIONS
from tests.losses.laws import LAWS, OURS
from tests.strategies import Problem, problem, problems

TRIED = [
    (case, law)
    for case in CASES
    for law in LAWS
    if (case, law) not in EXCEPTIONS and (CASES[case].family, law) not in EXCEPTIONS
]
EXCEPTED = [(case, law) for case in CASES for law in LAWS if (case, law) not in TRIED]


@pytest.mark.parametrize(("case", "law"), TRIED, ids=[f"{case}: {law}" for case, law in TRIED])
def test_law(case: str, law: str):
    @seed(zlib.crc32(f"{case}: {law}".encode()))  # other examples for each, the same in every run
    @given(problems())
    def holds(drawn: Problem) -> None:
        LAWS[law](CASES[case], drawn)

    # The shape checks take more time than the losses: one law of each case runs under them.
    with shapes_checked(law == "1 padding"):
        holds()


@pytest.mark.parametrize(
    ("case", "law"), EXCEPTED, ids=[f"{case}: {law}" for case, law in EXCEPTED]
)
def test_exception_is_needed(case: str, law: str):
    """An excepted law does fail (or cannot even be asked) somewhere: else the entry is stale."""
    for number in range(40):
        try:
            LAWS[law](
                CASES[case],
                problem(
                    number, ((3, 5, 1, 4), (4, 4, 4))[number % 2], noise=(0.3, 2.0)[number // 2 % 2]
                ),
            )
        except Exception:
            return
    pytest.fail("the law holds: take the exception off the table")


KEPT = {
    **{name: "reference_logprobs" for name in CASES if name.startswith("kl")},
    **dict.fromkeys(("to_tokens", "at_last_token"), "rewards"),
}
"""Inputs of which a gradient is not asked for but may be had."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_trained_is_a_constant_and_metrics_hold_no_graph(name: str):
    case, drawn = CASES[name], problem(0)
    arrays = arrays_in(case, drawn, lay_out(drawn))
    floats = {key for key in case.inputs if arrays[key].is_floating_point()} - set(OURS)
    leaves = {key: arrays[key].clone().requires_grad_() for key in floats}
    for variant in range(len(case.options)):
        output = case(arrays | leaves, variant)
        for key in floats - {*case.differentiable, KEPT.get(name)}:
            # A loss that reaches no leaf has no graph.
            assert not output.loss.requires_grad or torch.autograd.grad(
                output.loss, leaves[key], allow_unused=True, retain_graph=True
            ) == (None,), key
        assert not any(value.requires_grad for value in pytree.tree_leaves(output.metrics))


def test_exceptions_name_real_cases_and_laws():
    known = set(CASES) | {case.family for case in CASES.values()}
    assert [key for key in EXCEPTIONS if key[0] not in known or key[1] not in LAWS] == []
    assert all(reason for reason in EXCEPTIONS.values())


def test_every_cell_is_tried_or_excepted():
    assert len(TRIED) + len(EXCEPTED) == len(CASES) * len(LAWS)
    assert {case for case, _ in TRIED} == set(CASES)


OTHER_LAWS = {
    "10 reward shift and scale": (
        "losses.test_advantages.test_law_10_a_shift_of_all_rewards_changes_nothing",
        "losses.test_advantages.test_law_10_a_positive_factor_changes_nothing_with_a_standard_deviation",
        "losses.test_advantages.test_law_10_of_pass_at_k_and_max_rl",
    ),
    "11 ratio 1, inactive clips": (
        "losses.test_policy.test_at_ratio_one_every_gradient_is_reinforces",
        "losses.test_policy.test_clip_is_inactive_inside_the_trust_region",
        "losses.test_policy.test_dual_clip_is_inactive_without_negative_advantages",
    ),
    "12 sums and equal groups": (
        "losses.test_advantages.test_law_12_group_advantages_sum_to_zero",
        "losses.test_advantages.test_law_12_equal_groups_give_exact_zeros",
    ),
    "13 KL estimates": (
        "losses.test_kl.test_law_13_k1_and_k3_are_unbiased_and_k3_is_never_negative",
        "losses.test_kl.test_law_13_every_estimate_is_zero_for_the_reference_itself",
    ),
    "14 ends, antisymmetry, shift": (
        "losses.test_distillation.test_the_ends_of_mixed_are_forward_and_reverse",
        "losses.test_preference.test_dpo_is_antisymmetric_in_the_pair",
        "losses.test_preference.test_bradley_terry_is_shift_invariant",
    ),
    "15 layouts come back": (
        "data.test_padding.test_unpad_undoes_pad",
        "data.test_packing.test_unpack_undoes_pack",
        "data.test_sharding.test_merge_undoes_shard_by_rank",
        "data.test_sharding.test_merge_undoes_fixed_rows",
        "data.test_sharding.test_merge_undoes_a_token_budget",
    ),
}
"""The laws that speak of single functions: where they are."""


@pytest.mark.parametrize("law", OTHER_LAWS)
def test_the_other_laws_are_property_tests(law: str):
    for path in OTHER_LAWS[law]:
        module, _, name = path.rpartition(".")
        assert is_hypothesis_test(getattr(importlib.import_module(f"tests.{module}"), name)), path


@pytest.mark.parametrize(("name", "examples"), [("ci", 20), ("thorough", 200)])
def test_the_profile_is_derandomised(name: str, examples: int):
    profile = settings.get_profile(name)
    assert profile.max_examples == examples and profile.derandomize and profile.deadline is None


WITHOUT_CASE = {
    "needs": "declares what a loss reads; tests/parallel/test_needs.py",
    "needs_of": "returns what a loss declares; tests/parallel/test_needs.py",
    "scale_rewards": "by hand in test_advantages.py",
    "overlong_penalty": "by hand in test_advantages.py",
    "length_adaptive_lambda": "by hand in test_advantages.py",
    "grpo": "names a choice of `advantages`",
    "rloo": "names a choice of `advantages`",
    "dr_grpo": "names a choice of `advantages`",
    "nemo_grpo": "names a choice of `advantages`",
    "filter_logits": "what `token_logprobs` applies to its logits",
    "flat_linear_logprobs": "what `linear_token_logprobs` calls",
    "require_same_support": "a check of two kinds",
    "explained_variance": "by hand in test_value.py",
    "finalize": "of metrics, law 17 for all of them",
    "merge": "of metrics, law 17 for all of them",
}


def test_every_public_function_has_a_case():
    """Or a reason why not: so that a new loss can't come without its laws."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(cases.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    public = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))} | {
        "advantages",
        "kl",
    }
    assert public - used == set(WITHOUT_CASE)

"""Every function that the generic laws are run on, with its options, and the one table of the laws
that a function cannot have.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemorl.losses import advantages as adv
from nemorl.losses import distillation as distill
from nemorl.losses import importance, kl, logprobs, masks, policy, preference, supervised, value
from nemorl.losses.types import LossOutput, Mean, masked, same_segment, segment_starts
from tests.helpers import Case


def _as_loss(values: Tensor, cotangent: Tensor, metrics: Any = None) -> LossOutput:
    """A function that gives one number a token as a loss: its sum against fixed random numbers, in
    padding and off the mask too.
    """
    return LossOutput((values * cotangent).sum(), metrics or {})


def _mapped(
    function: Callable[..., Any], *keywords: str, **fixed: Any
) -> Callable[..., LossOutput]:
    """The function as a loss, with the last arrays before the cotangent given by `keywords`."""

    def loss(*arrays: Tensor, **options: Any) -> LossOutput:
        count = len(arrays) - 1 - len(keywords)
        named = dict(zip(keywords, arrays[count:-1], strict=True))
        values = function(*arrays[:count], **named, **fixed, **options)
        if isinstance(values, tuple):
            values = values[0] + 0.7 * values[1]
        return _as_loss(values, arrays[-1])

    return loss


POLICY_INPUTS = ("token_logprobs", "prev_logprobs", "advantages", "loss_weights")
CLIPS: tuple[dict[str, Any], ...] = (
    {},
    {"clip_high": 0.28},
    {"dual_clip": 3.0},
    {"clip_low": 0.02, "clip_high": 0.02, "dual_clip": 1.2},
)


def _policy_cases() -> list[Case]:
    grad, weighted = ("token_logprobs",), (*POLICY_INPUTS, "importance_weights")
    segmented = (*POLICY_INPUTS, "segment_ids", "importance_weights")
    of_sequence: tuple[dict[str, Any], ...] = (
        {"clip_low": 0.2, "clip_high": 0.2},
        {},
        {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5},
    )

    def on_policy(logprobs, *rest, **options):
        return policy.clipped(logprobs, policy.on_policy(logprobs), *rest, **options)

    def decoupled(logprobs, generation, versions, *rest, progress, **options):
        prev = importance.interpolated_logprobs(
            logprobs, generation, versions, version=4, progress=progress
        )
        return policy.clipped(logprobs, prev, *rest, **options)

    of_versions = ("token_logprobs", "generation_logprobs", "policy_versions", *POLICY_INPUTS[2:])
    return [
        Case("clipped", policy.clipped, weighted, grad, CLIPS),
        Case(
            "clipped interpolated",
            decoupled,
            of_versions,
            grad,
            ({"progress": 1.0}, {"progress": 3.0, "dual_clip": 3.0}),
        ),
        Case("clipped without importance weights", policy.clipped, POLICY_INPUTS, grad, CLIPS),
        Case("gspo", policy.gspo, segmented, grad, of_sequence),
        Case(
            "gspo_token",
            policy.gspo,
            segmented,
            grad,
            tuple({**options, "token_gradient": True} for options in of_sequence),
        ),
        Case("gmpo", policy.gmpo, segmented, grad, ({}, {"clip_low": 0.1, "clip_high": 0.3})),
        Case("sapo", policy.sapo, weighted, grad, ({}, {"temperature_negative": 5.0})),
        Case("cispo", policy.cispo, weighted, grad, ({}, {"clip_low": 0.2, "clip_high": 0.2})),
        Case("reinforce", policy.reinforce, weighted, grad),
        Case(
            "clipped on policy",
            on_policy,
            ("token_logprobs", "advantages", "loss_weights"),
            grad,
            CLIPS,
        ),
    ]


def _kl_cases() -> list[Case]:
    inputs, grad = ("token_logprobs", "reference_logprobs", "loss_weights"), ("token_logprobs",)
    estimators = (
        {"estimator": "k3"},
        {"estimator": "k1"},
        {"estimator": "k2"},
        {"input_clamp": 1.0, "output_clamp": 0.5},
    )

    def options(gradient: str, **more: Any) -> tuple[dict[str, Any], ...]:
        return tuple({"gradient": gradient, **estimator, **more} for estimator in estimators)

    maps = ("token_logprobs", "reference_logprobs", "mask")

    def divergence(student: Tensor, reference: Tensor, mask: Tensor, **options: Any) -> Tensor:
        there = mask[..., None].expand_as(student)
        found = kl.divergence(masked(there, student), masked(there, reference), **options)
        return masked(mask, found)

    directions = tuple({"direction": direction, "mix": 0.3} for direction in kl.DIRECTIONS)
    return [
        Case("kl_loss pathwise", policy.kl_loss, inputs, grad, options("pathwise", coef=0.1)),
        Case("kl_loss score", policy.kl_loss, inputs, grad, options("score", coef=0.1)),
        Case(
            "kl_loss importance",
            policy.kl_loss,
            (*inputs, "generation_logprobs"),
            grad,
            options("importance", coef=0.1),
        ),
        Case("kl", _mapped(kl.kl), (*maps, "cotangent"), grad, options("pathwise"), family="map"),
        Case(
            "kl importance",
            _mapped(kl.kl, "generation_logprobs"),
            (*maps, "generation_logprobs", "cotangent"),
            grad,
            options("importance"),
            family="map",
        ),
        Case(
            "divergence",
            _mapped(divergence),
            ("target_logprobs", "top_logprobs", "mask", "cotangent"),
            ("target_logprobs", "top_logprobs"),
            directions,
            family="map",
        ),
    ]


def _other_token_losses() -> list[Case]:
    grad = ("token_logprobs",)
    value_inputs = ("values", "old_values", "returns", "loss_weights")

    def positive(logprobs, advantages, weights, **options):
        return policy.positive_nll(logprobs, advantages > 0, weights, **options)

    return [
        Case(
            "entropy_bonus",
            policy.entropy_bonus,
            ("entropy", "loss_weights"),
            ("entropy",),
            ({"coef": 0.01},),
        ),
        Case(
            "log_ratio_penalty",
            policy.log_ratio_penalty,
            ("token_logprobs", "generation_logprobs", "loss_weights"),
            grad,
            ({"coef": 0.1},),
        ),
        Case(
            "positive_nll",
            positive,
            ("token_logprobs", "advantages", "loss_weights"),
            grad,
            ({"coef": 0.1},),
        ),
        Case("nll", supervised.nll, ("token_logprobs", "loss_weights"), grad),
        Case(
            "nll dynamic",
            partial(supervised.nll, dynamic=True),
            ("token_logprobs", "loss_weights"),
            grad,
        ),
        Case(
            "value_loss",
            value.value_loss,
            value_inputs,
            ("values",),
            ({"clip": 0.2}, {"clip": None}),
        ),
    ]


def _importance_cases() -> list[Case]:
    inputs = ("prev_logprobs", "generation_logprobs", "mask", "segment_ids")
    bounds = ({"min": 0.5, "max": 2.0}, {"min": 0.0, "max": 5.0})
    options = tuple(
        {"level": level, "mode": mode, **bound}
        for bound in bounds
        for level in importance.LEVELS
        for mode in importance.MODES
    )
    wide, near = (0.2, 4.0), (0.8, 1.25)
    drops = (
        {"token_bounds": near, "max": 9.0},
        {"extreme_bounds": wide, "level": "sequence"},
        {"geometric_bounds": near},
        {"probability_bounds": (0.1, 0.2), "mode": "mask"},
        {"binary_kl_bounds": (0.01, 0.02)},
        {"mean_binary_kl": 0.05},
        {"token_bounds": wide, "extreme_bounds": (0.1, 9.0), "geometric_bounds": (0.5, 2.0)},
    )

    def weights(*arrays: Tensor, **options: Any) -> LossOutput:
        values, metrics = importance.importance_weights(*arrays[:-1], **options)
        return _as_loss(values, arrays[-1], metrics)

    def gap(prev: Tensor, generation: Tensor, mask: Tensor, segment_ids: Tensor) -> LossOutput:
        return LossOutput(
            torch.zeros(()), importance.sampler_gap(prev, generation, mask, segment_ids)
        )

    def of_receipts(
        prev: Tensor, generation: Tensor, mask: Tensor, segment_ids: Tensor
    ) -> LossOutput:
        response = same_segment(segment_ids)
        first, *rest = importance.gap_by_depth(
            prev, generation, mask, response, segment_ids
        ).values()
        deeper = sum(rest, start=Mean(torch.zeros(()), torch.zeros(())))  # the wider, the more
        depths = {"first": first, "deeper": deeper}
        return LossOutput(
            torch.zeros(()), {**depths, **importance.support_ratio(prev, generation, mask)}
        )

    def of_tokens(ids: Tensor, generation: Tensor, mask: Tensor, segment_ids: Tensor) -> LossOutput:
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begin = torch.where(segment_starts(segment_ids), place, 0).cummax(-1).values
        positions = torch.where(segment_ids > 0, place - begin, 0)
        metrics = importance.token_receipt(ids, positions, generation, mask)
        return LossOutput(torch.zeros(()), {"tokens": metrics["receipts/tokens"]})

    of_ids = ("input_ids", *inputs[1:4])
    return [
        Case(
            "importance_weights",
            weights,
            (*inputs, "cotangent"),
            (),
            (*options, *drops),
            family="constant",
        ),
        Case(
            "importance_weights with advantages",
            weights,
            (*inputs, "advantages", "cotangent"),
            (),
            drops[3:5],
            family="constant",
        ),
        Case("sampler_gap", gap, inputs[:4], (), family="constant"),
        Case("support_ratio and gap_by_depth", of_receipts, inputs[:4], (), family="constant"),
        Case("token_receipt", of_tokens, of_ids, (), family="constant"),
    ]


def _logprob_cases() -> list[Case]:
    kinds = tuple(
        {"kind": logprobs.LogprobKind(**options)}
        for options in ({}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.05})
    )

    inputs = ("logits", "input_ids", "segment_ids", "cotangent")
    chunked, linear_inputs = (
        tuple({**kind, "chunk": chunk} for kind in kinds[:3] for chunk in (2, 64)),
        ("hidden", "head", *inputs[1:]),
    )
    shape: dict[str, Any] = {"family": "logits", "masked_by": "segment"}
    return [
        Case(
            "token_logprobs",
            _mapped(logprobs.token_logprobs, "segment_ids"),
            inputs,
            ("logits",),
            kinds,
            **shape,
        ),
        Case(
            "entropy",
            _mapped(logprobs.entropy, "segment_ids"),
            ("logits", "segment_ids", "cotangent"),
            ("logits",),
            kinds,
            **shape,
        ),
        Case(
            "linear_token_logprobs",
            _mapped(logprobs.linear_token_logprobs, "segment_ids", with_entropy=True),
            linear_inputs,
            ("hidden", "head"),
            chunked,
            half_rounding=0.1,
            **shape,
        ),
    ]


def _distillation_cases() -> list[Case]:
    plain = ({}, {"direction": "jensen_shannon", "mix": 0.3})
    reverse = ({"direction": "reverse", "temperature": 2.0}, {"direction": "mixed", "mix": 0.3})
    student = ("target_logprobs", "target_rest_logprobs")
    inputs = (*student, "top_ids", "some_top_logprobs", "loss_weights", "entropy")

    def distillation(*arrays: Tensor, **options: Any) -> LossOutput:
        return distill.distillation_topk(*arrays[:-1], entropy=arrays[-1], **options)

    return [
        Case(
            f"distillation_topk {name}",
            distillation,
            inputs,
            grad,
            tuple({"outside": name.split()[0], **option} for option in options),
        )
        for name, grad, options in (
            ("renormalize", student[:1], plain + reverse),
            ("rest_mass", student, plain + reverse),
            ("zero", student, plain),
            ("zero reverse", (*student, "entropy"), reverse),
        )
    ]


def _preference_cases() -> list[Case]:
    policies = ("policy_chosen", "policy_rejected")
    with_reference = (*policies, "reference_chosen", "reference_rejected", "pair_weights")
    betas = ({"beta": 0.1}, {"beta": 0.5})
    smooth = (
        *betas,
        {"beta": 0.5, "label_smoothing": 0.1},
        {"beta": 0.5, "label_smoothing": 0.1, "robust": True},
        *({"divergence": each} for each in ("jensen_shannon", "forward_kl", 0.5)),
    )
    margins = ({}, {"beta": 1.0, "margin": 0.5, "label_smoothing": 0.1})
    kto_inputs = ("policy_chosen", "reference_chosen", "desirable", "pair_weights", "kl_baseline")
    kto_options = (*betas, {"desirable_coef": 1.3, "undesirable_coef": 0.7})
    scores = ("chosen_scores", "rejected_scores")

    def sums(
        logprobs: Tensor, mask: Tensor, segment_ids: Tensor, cotangent: Tensor, **options: Any
    ) -> LossOutput:
        values = preference.sequence_logprobs(
            logprobs, mask, segment_ids, num_sequences=cotangent.shape[0], **options
        )
        return _as_loss(values, cotangent)

    of_pairs: dict[str, Any] = {"family": "preference"}
    alone = (*policies, "pair_weights")
    bradley_terry = (*scores, "pair_weights", "margin")
    sequences = {"options": ({}, {"average": True}), "family": "map"}
    token_inputs, grad = ("token_logprobs", "mask"), ("token_logprobs",)
    return [
        Case("dpo", preference.dpo, with_reference, policies, smooth, **of_pairs),
        Case("ipo", preference.ipo, with_reference, policies, betas, **of_pairs),
        Case("hinge", preference.hinge, with_reference, policies, betas, **of_pairs),
        Case("simpo", preference.simpo, alone, policies, margins, **of_pairs),
        Case("orpo", preference.orpo, alone, policies, **of_pairs),
        Case("kto", preference.kto, kto_inputs, ("policy_chosen",), kto_options, **of_pairs),
        Case(
            "bradley_terry",
            preference.bradley_terry,
            bradley_terry,
            scores,
            ({}, {"centering": 0.1}),
            **of_pairs,
        ),
        Case(
            "sequence_logprobs",
            sums,
            (*token_inputs, "segment_ids", "ordered_cotangent"),
            grad,
            **sequences,
        ),
        Case(
            "sequence_logprobs of rows",
            _mapped(preference.sequence_logprobs),
            (*token_inputs, "sequence_cotangent"),
            grad,
            **sequences,
        ),
    ]


def _weight_cases() -> list[Case]:
    constant = partial(masks.constant_weights, length=7)
    return [
        Case(name, _mapped(function), ("mask", *by, "cotangent"), (), family="weights")
        for name, function, *by in (
            ("token_mean_weights", masks.token_mean_weights),
            ("sequence_mean_weights", masks.sequence_mean_weights, "segment_ids"),
            ("constant_weights", constant, "segment_ids"),
            ("group_mean_weights", masks.group_mean_weights, "token_group_id"),
            ("group_mean_weights of rows", masks.group_mean_weights, "group_id"),
        )
    ]


def _advantage_cases() -> list[Case]:
    inputs = ("rewards", "group_id", "sequence_cotangent")
    of_group: dict[str, Any] = {"family": "advantages", "whole_groups": True}
    grouped = tuple(
        {"baseline": b, "scale": s}
        for b in ("group_mean", "leave_one_out")
        for s in ("group_std", "leave_one_out_std", "none")
    )
    of_batch = (
        {"baseline": "batch_mean", "scale": "batch_std"},
        {"baseline": "group_mean", "scale": "batch_std"},
    )

    def informative(rewards, group_id):
        return adv.informative_groups(rewards, group_id).float()

    return [
        Case("advantages of groups", _mapped(adv.advantages), inputs, (), grouped, **of_group),
        Case(
            "advantages of the batch",
            _mapped(adv.advantages),
            inputs,
            (),
            of_batch,
            family="advantages",
        ),
        Case(
            "advantages by length",
            _mapped(adv.advantages, "lengths", baseline="length_weighted"),
            ("rewards", "group_id", "lengths", "sequence_cotangent"),
            (),
            **of_group,
        ),
        Case(
            "advantages over greedy",
            _mapped(adv.advantages, "greedy_rewards", baseline="greedy", scale="none"),
            ("rewards", "group_id", "greedy_rewards", "sequence_cotangent"),
            (),
            family="advantages",
        ),
        Case(
            "gdpo",
            _mapped(adv.gdpo),
            ("reward_components", *inputs[1:]),
            (),
            ({"weights": (1.0, 0.5)},),
            family="advantages",
        ),
        Case(
            "pass_at_k",
            _mapped(adv.pass_at_k),
            inputs,
            (),
            ({"k": 2}, {"k": 3}, {"k": 1}),
            **of_group,
        ),
        Case("max_rl", _mapped(adv.max_rl), inputs, (), **of_group),
        Case("informative_groups", _mapped(informative), inputs, (), **of_group),
    ]


def _token_advantage_cases() -> list[Case]:
    lambdas = ({}, {"gamma": 0.9, "lam": 0.8}, {"gamma": 0.9, "lam": 0.5, "value_lam": 1.0})
    opd_inputs, row_inputs = (
        ("teacher_logprobs", "prev_logprobs", "mask", "cotangent"),
        ("rewards", "mask", "cotangent"),
    )
    plus_plus: tuple[dict[str, Any], ...] = ({"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_to_go": False})

    rows: dict[str, Any] = {"differentiable": (), "family": "token advantages"}
    return [
        Case("opd", _mapped(adv.opd), opd_inputs, (), family="map"),
        Case("to_tokens", _mapped(adv.to_tokens), row_inputs, **rows),
        Case("at_last_token", _mapped(adv.at_last_token), row_inputs, **rows),
        Case(
            "gae",
            _mapped(adv.gae),
            ("token_rewards", "values", "mask", "cotangent"),
            options=lambdas,
            **rows,
        ),
        Case("whiten", _mapped(adv.whiten), ("values", "mask", "cotangent"), (), family="map"),
        Case(
            "reinforce_plus_plus",
            _mapped(adv.reinforce_plus_plus),
            ("rewards", "kl", "mask", "cotangent"),
            options=plus_plus,
            **rows,
        ),
        Case(
            "reinforce_plus_plus over groups",
            _mapped(adv.reinforce_plus_plus, "group_id", kl_coef=0.1),
            ("rewards", "kl", "mask", "group_id", "cotangent"),
            **rows,
        ),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for cases in (
        _policy_cases,
        _kl_cases,
        _other_token_losses,
        _importance_cases,
        _logprob_cases,
        _distillation_cases,
        _preference_cases,
        _weight_cases,
        _advantage_cases,
        _token_advantage_cases,
    )
    for case in cases()
}

_STOPPED = (
    "a stop-gradient is part of its definition: the gradient is not the derivative of the value;"
    " worked examples pin it"
)
_ONE_NUMBER = (
    "reads one number a sequence, which has no place in a row; sequence_logprobs carries the law"
)
_NO_WEIGHTS = (
    "takes no loss_weights: its result is what a loss, which is linear in them, is made of"
)
_CONSTANT = "nothing is differentiated: its result is a constant"
_NO_METRICS = "gives no metrics"
_WHOLE_STEP = (
    "built once from the whole step, so that the losses weighted with it add up; in parts it would"
    " be another reduction"
)
_PADDING_ONLY = (
    "knows no loss mask: a model's output has a log-probability wherever there is a next token"
)
_NO_MASK = "every response counts: there is no mask"
_BEFORE_PACKING = "one number a response, computed before rows are packed"
_WHOLE_BATCH = "a mean or deviation over the batch: a part, or an added row, has another"
_NO_FLOATS = "reads masks and labels only"

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("gspo_token", "8 gradcheck"): _STOPPED,
    ("cispo", "8 gradcheck"): _STOPPED,
    ("nll dynamic", "8 gradcheck"): _STOPPED,
    ("reinforce", "8 gradcheck"): _STOPPED,
    ("clipped on policy", "8 gradcheck"): _STOPPED,
    ("clipped interpolated", "8 gradcheck"): _STOPPED,
    ("kl_loss score", "8 gradcheck"): _STOPPED,
    ("map", "9 linearity"): _NO_WEIGHTS,
    ("map", "17 metrics"): _NO_METRICS,
    ("sequence_logprobs of rows", "2 packing"): "without segment_ids a row is one sequence",
    ("constant", "8 gradcheck"): _CONSTANT,
    ("constant", "9 linearity"): _NO_WEIGHTS,
    ("logits", "6 empty mask"): _PADDING_ONLY,
    ("logits", "9 linearity"): _NO_WEIGHTS,
    ("logits", "17 metrics"): _NO_METRICS,
    ("preference", "2 packing"): _ONE_NUMBER,
    ("weights", "3 additivity"): _WHOLE_STEP,
    ("weights", "5 masked slots"): _NO_FLOATS,
    ("weights", "7 precision"): _NO_FLOATS,
    ("weights", "8 gradcheck"): _CONSTANT,
    ("weights", "9 linearity"): "is what makes loss_weights",
    ("weights", "17 metrics"): _NO_METRICS,
    (
        "group_mean_weights of rows",
        "2 packing",
    ): "labels of rows; packed rows take one label a token",
    ("advantages", "2 packing"): _BEFORE_PACKING,
    ("advantages", "5 masked slots"): _NO_MASK,
    ("advantages", "6 empty mask"): _NO_MASK,
    ("advantages", "8 gradcheck"): _CONSTANT,
    ("advantages", "9 linearity"): _NO_WEIGHTS,
    ("advantages", "17 metrics"): _NO_METRICS,
    ("advantages of the batch", "1 padding"): _WHOLE_BATCH,
    ("advantages of the batch", "3 additivity"): _WHOLE_BATCH,
    ("gdpo", "1 padding"): _WHOLE_BATCH,
    ("gdpo", "3 additivity"): _WHOLE_BATCH,
    ("token advantages", "2 packing"): _BEFORE_PACKING,
    ("token advantages", "8 gradcheck"): _CONSTANT,
    ("token advantages", "9 linearity"): _NO_WEIGHTS,
    ("token advantages", "17 metrics"): _NO_METRICS,
    ("opd", "8 gradcheck"): _CONSTANT,
    ("whiten", "3 additivity"): _WHOLE_BATCH,
    ("whiten", "8 gradcheck"): _CONSTANT,
    ("reinforce_plus_plus", "3 additivity"): _WHOLE_BATCH,
    ("reinforce_plus_plus over groups", "3 additivity"): _WHOLE_BATCH,
    ("advantages over greedy", "1 padding"): "an added row would be a response with a reward",
}
"""(case or family, law) -> why there can be no such law.

The only such table; `test_laws.py` tries each entry and refuses those that hold.
"""

"""The laws of docs/numerics.md that make sense for any loss: each is a function that raises when
`case` breaks the law on `problem`.

`test_laws.py` runs every law on every case, `test_negative_controls.py` shows that wrong losses are
caught. Laws 10 to 14 speak of single functions and live in their test files, law 15 in
`tests/data/`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nemorl.losses.types import finalize
from tests.helpers import (
    SHIFTED,
    Case,
    Layout,
    Result,
    arrays_in,
    assert_same,
    assert_same_metrics,
    evaluate,
    lay_out,
    result_of,
)
from tests.strategies import Problem

OURS = ("loss_weights", "pair_weights", "cotangent", "sequence_cotangent", "ordered_cotangent")
"""What no model computes: weights and the tests' own cotangents."""
POISON = (float("nan"), float("inf"), -float("inf"), 1e30)


def padding(case: Case, problem: Problem) -> None:
    """Law 1: padding on the right, on the left, and rows of nothing else change nothing."""
    generator = problem.generator(1)
    extra = int(torch.randint(0, 5, (), generator=generator))
    left = torch.randint(0, 4, (problem.num_sequences + 1,), generator=generator).tolist()
    order = torch.tensor([*range(problem.num_sequences), -1])
    if torch.rand((), generator=generator) < 0.5:
        order = order.roll(1)
    if torch.rand((), generator=generator) < 0.5:
        left = [0] * len(left)
    wide = lay_out(problem, order.tolist(), width=max(problem.lengths) + extra, left=left)
    assert_same(evaluate(case, problem, lay_out(problem)), evaluate(case, problem, wide))


def packing(case: Case, problem: Problem) -> None:
    """Law 2: several sequences in a row, wherever they lie, are as good as one a row."""
    assert_same(evaluate(case, problem, lay_out(problem)), evaluate(case, problem, packed(problem)))


def packed(problem: Problem) -> Layout:
    """The sequences as `nemorl.data.packing.pack` lays them, by a random plan."""
    from nemorl.data.batch import TokenBatch
    from nemorl.data.packing import pack

    generator = problem.generator(2)
    plain = lay_out(problem)
    order = torch.randperm(problem.num_sequences, generator=generator).tolist()
    cuts = [i for i in range(1, len(order)) if torch.rand((), generator=generator) < 0.4]
    plan = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True))
    mask = torch.zeros_like(plain.slots, dtype=torch.bool)
    there = plain.segment_ids > 0
    batch = TokenBatch(
        input_ids=plain.slots.clamp(min=0),  # its own number, which says where each token went
        segment_ids=plain.segment_ids,
        position_ids=torch.where(there, torch.arange(plain.slots.shape[1]), 0),
        loss_mask=mask,
        response_mask=mask,
    )
    spare = int(torch.randint(0, 3, (), generator=generator))
    result = pytree.tree_map_only(
        Tensor, lambda array: torch.nn.functional.pad(array, (0, spare)), pack(batch, plan)
    )
    slots = torch.where(result.segment_ids > 0, result.input_ids, -1)
    assert sorted(slots[slots >= 0].tolist()) == list(range(problem.num_tokens)), (
        "pack lost or doubled a token"
    )
    return Layout(slots, result.segment_ids, None)


def additivity(case: Case, problem: Problem) -> None:
    """Law 3: the losses and gradients of any microbatches on any ranks add up to the whole's.
    (Metrics are law 17.)
    """
    whole, parts = (
        evaluate(case, problem, lay_out(problem)),
        evaluate(case, problem, *shards(case, problem)),
    )
    assert_same(Result(whole.loss, whole.gradients, {}), Result(parts.loss, parts.gradients, {}))


def metrics_merge(case: Case, problem: Problem) -> None:
    """Law 17: the merged metrics of the shards are the metrics of the whole."""
    whole = evaluate(case, problem, lay_out(problem)).metrics
    assert whole, "no metrics"
    assert_same_metrics(whole, evaluate(case, problem, *shards(case, problem)).metrics)


def shards(case: Case, problem: Problem) -> list[Layout]:
    """Any partition of the sequences, each part with its own width; groups stay whole where the
    case needs them.
    """
    generator = problem.generator(3)
    units = torch.arange(problem.num_sequences)
    if case.whole_groups:
        units = problem.sequences["group_id"].unique(return_inverse=True)[1]
    owner = torch.randint(0, 3, (int(units.max()) + 1,), generator=generator)[units]
    order = torch.randperm(problem.num_sequences, generator=generator)
    return [
        lay_out(problem, order[owner[order] == rank].tolist()) for rank in owner.unique().tolist()
    ]


def permutation(case: Case, problem: Problem) -> None:
    """Law 4: the order of the rows and the names of the groups mean nothing."""
    generator = problem.generator(4)
    order = torch.randperm(problem.num_sequences, generator=generator).tolist()
    names = torch.randperm(100, generator=generator) * 2**40 - 2**45  # numbers as of a long run
    renamed = problem.but(
        group_id=names[problem.sequences["group_id"]],
        token_group_id=names[problem.tokens["token_group_id"]],
    )
    assert_same(
        evaluate(case, problem, lay_out(problem)), evaluate(case, renamed, lay_out(problem, order))
    )


def masked_slots(case: Case, problem: Problem) -> None:
    """Law 5: NaN, Inf and huge numbers off the mask change no bit of value, gradient or metric."""
    layout = lay_out(problem, width=max(problem.lengths) + 1)
    arrays = arrays_in(case, problem, layout)
    generator = problem.generator(5)
    poisoned = {}
    for name, value in arrays.items():
        if (
            name in case.inputs
            and value.is_floating_point()
            and name not in (*OURS, *problem.shared)
        ):
            live = live_slots(case, arrays, name, value)
            poison = torch.tensor(POISON, dtype=value.dtype)[
                torch.randint(0, len(POISON), value.shape, generator=generator)
            ]
            poisoned[name] = torch.where(live, value, poison)
    assert poisoned, "no input that could be poisoned"
    clean, dirty = (
        on_arrays(case, arrays, problem.seed),
        on_arrays(case, arrays | poisoned, problem.seed),
    )
    assert torch.equal(clean.loss, dirty.loss) and clean.loss.isfinite(), (
        f"loss {clean.loss} became {dirty.loss}"
    )
    assert clean.metrics == dirty.metrics, f"metrics {clean.metrics} became {dirty.metrics}"
    for name, gradient in clean.gradients.items():
        other = dirty.gradients[name]
        assert torch.equal(gradient, other) and gradient.isfinite().all(), (
            f"gradient of {name}: {gradient} became {other}"
        )
        if name in poisoned:
            dead = ~live_slots(case, arrays, name, gradient).expand_as(gradient)
            assert (gradient[dead] == 0).all(), f"gradient of {name} in masked slots: {gradient}"


def live_slots(case: Case, arrays: dict[str, Tensor], name: str, value: Tensor) -> Tensor:
    """Which entries of an array the case may read, shaped so that it broadcasts over `value`."""
    if value.dim() < 2:
        assert "pair_weights" in case.inputs or "mask" in case.inputs, "there is no mask"
        return (
            arrays["pair_weights"] != 0
            if "pair_weights" in case.inputs
            else torch.ones_like(value, dtype=torch.bool)
        )
    live = arrays["mask"] if case.masked_by == "mask" else arrays["segment_ids"] > 0
    if name in SHIFTED:  # the first token of a row is nobody's target
        live = torch.cat([live[:, 1:], torch.zeros_like(live[:, :1])], 1)
    return live.reshape(live.shape + (1,) * (value.dim() - 2))


def on_arrays(case: Case, arrays: dict[str, Tensor], seed: int) -> Result:
    """Evaluate with the batch's arrays themselves as leaves."""
    leaves = {name: arrays[name].clone().requires_grad_() for name in case.differentiable}
    return result_of(case(arrays | leaves, seed), leaves)


def empty_mask(case: Case, problem: Problem) -> None:
    """Law 6: nothing to train on gives loss 0, gradient 0 (not NaN or None), finite metrics."""
    names = {"mask", "loss_weights", "pair_weights"} & set(case.inputs)
    assert names, "no mask and no weights among the inputs"
    own = problem.tokens | problem.sequences
    result = evaluate(
        case, problem.but(**{name: torch.zeros_like(own[name]) for name in names}), lay_out(problem)
    )
    assert result.loss == 0, result.loss
    assert all((gradient == 0).all() for gradient in result.gradients.values()), result.gradients
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics


def precision(case: Case, problem: Problem) -> None:
    """Law 7: float32 agrees with float64, and bfloat16 inputs give what the same numbers give in
    float32.
    """
    own = problem.tokens | problem.sequences | problem.shared
    assert any(
        own[name].is_floating_point() for name in case.inputs if name in own and name not in OURS
    ), "no float among the inputs"
    layout = lay_out(problem)
    low = _cast(problem, torch.bfloat16)
    single = evaluate(case, _cast(problem, torch.float32), layout)
    double = evaluate(case, _cast(_cast(problem, torch.float32), torch.float64), layout)
    assert_same(double, single, rtol=2e-4, atol=2e-5, metric_tol=1e-4)
    half, same_numbers = (
        evaluate(case, low, layout),
        evaluate(case, _cast(low, torch.float32), layout),
    )
    assert half.loss.dtype == torch.float32, f"reduced in {half.loss.dtype}"
    torch.testing.assert_close(
        half.loss, same_numbers.loss, rtol=2e-4 + case.half_rounding, atol=2e-5 + case.half_rounding
    )
    for name, gradient in same_numbers.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(
            half.gradients[name].float(),
            gradient,
            rtol=2**-7,
            atol=(2**-8 + case.half_rounding) * largest + 1e-6,
        )


def _cast(problem: Problem, dtype: torch.dtype) -> Problem:
    """The floats in another precision; weights and the tests' own cotangents, which no model
    computes, never below float32.
    """
    own = problem.tokens | problem.sequences | problem.shared
    wide = torch.promote_types(dtype, torch.float32)
    return problem.but(
        **{
            name: value.to(wide if name in OURS else dtype)
            for name, value in own.items()
            if value.is_floating_point()
        }
    )


def gradients(case: Case, problem: Problem) -> None:
    """Law 8: the gradient is the derivative of the value."""
    assert case.differentiable, "no differentiable input"
    arrays = arrays_in(case, problem, lay_out(problem))
    leaves = [arrays[name].clone().requires_grad_() for name in case.differentiable]

    def loss(*values: Tensor) -> Tensor:
        return case(arrays | dict(zip(case.differentiable, values, strict=True)), problem.seed).loss

    assert torch.autograd.gradcheck(loss, leaves, eps=1e-7, atol=1e-5, rtol=1e-4, fast_mode=True)


def linearity(case: Case, problem: Problem) -> None:
    """Law 9: the loss is linear in its weights, as long as they train on the same tokens."""
    name = "pair_weights" if "pair_weights" in case.inputs else "loss_weights"
    assert name in case.inputs, "no weights among the inputs"
    weights = (problem.tokens | problem.sequences)[name]
    other = torch.where(
        weights != 0,
        torch.rand(weights.shape, generator=problem.generator(6), dtype=weights.dtype) + 0.1,
        0.0,
    )
    one, two, both = (
        evaluate(case, problem.but(**{name: w}), lay_out(problem))
        for w in (weights, other, 2 * weights + 3 * other)
    )
    torch.testing.assert_close(both.loss, 2 * one.loss + 3 * two.loss, rtol=1e-8, atol=1e-10)
    for key, gradient in both.gradients.items():
        torch.testing.assert_close(
            gradient, 2 * one.gradients[key] + 3 * two.gradients[key], rtol=1e-8, atol=1e-10
        )


def transforms(case: Case, problem: Problem) -> None:
    """Law 16: `torch.func.grad` and `torch.func.vmap` give the eager result."""
    arrays = arrays_in(case, problem, lay_out(problem))
    inputs = {name: arrays[name] for name in case.inputs}
    eager = on_arrays(case, inputs, problem.seed)
    if case.differentiable:
        leaves = {name: inputs[name] for name in case.differentiable}
        functional = torch.func.grad(lambda leaves: case(inputs | leaves, problem.seed).loss)(
            leaves
        )
        for name, gradient in eager.gradients.items():
            torch.testing.assert_close(functional[name], gradient, rtol=1e-8, atol=1e-10)
    others = [
        inputs,
        {
            name: value - 0.1 * value.abs() if value.is_floating_point() else value
            for name, value in inputs.items()
        },
    ]
    stacked = {name: torch.stack([arrays[name] for arrays in others]) for name in inputs}
    together = torch.func.vmap(lambda arrays: case(arrays, problem.seed))(stacked)
    for i, arrays in enumerate(others):
        alone, row = case(arrays, problem.seed), pytree.tree_map(lambda value: value[i], together)  # noqa: B023
        torch.testing.assert_close(row.loss, alone.loss, rtol=1e-8, atol=1e-10)
        assert_same_metrics(finalize(alone.metrics), finalize(row.metrics))


LAWS: dict[str, Callable[[Case, Problem], None]] = {
    "1 padding": padding,
    "2 packing": packing,
    "3 additivity": additivity,
    "4 permutation": permutation,
    "5 masked slots": masked_slots,
    "6 empty mask": empty_mask,
    "7 precision": precision,
    "8 gradcheck": gradients,
    "9 linearity": linearity,
    "16 transforms": transforms,
    "17 metrics": metrics_merge,
}

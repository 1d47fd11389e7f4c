"""Cases (a function and its options), layouts (how the same sequences can lie in a batch), and the
evaluation of one in the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import jaxtyping
import torch
from torch import Tensor

from nemorl.losses.types import LossOutput, finalize
from tests.strategies import Problem

ZERO_IN_PADDING = (
    *("mask", "loss_weights", "pair_weights", "truncated", "desirable", "lengths"),
    *("group_id", "token_group_id", "input_ids", "top_ids", "sequence"),
)
"""What says "nothing here", or must hold a valid id; everything else is garbage in padding."""
SHIFTED = ("logits", "teacher_logits", "hidden")
"""Arrays of a model's output, whose index t is about token t + 1."""


@dataclass(frozen=True)
class Case:
    """One function with its options; a call takes the arrays of a batch and gives a `LossOutput`,
    whatever the function itself gives.
    """

    name: str
    function: Callable[..., LossOutput]
    inputs: tuple[str, ...]
    """The arrays that it reads."""
    differentiable: tuple[str, ...]
    """Those that get a gradient."""
    options: tuple[dict[str, Any], ...] = ({},)
    """Variants; the example's seed chooses one."""
    family: str = "loss"
    masked_by: str = "mask"
    """What makes a slot one that must not be read:

    `mask`, or `segment` for functions that know padding only.
    """
    whole_groups: bool = False
    """A shard must hold all the sequences of a group."""
    half_rounding: float = 0.0
    """Where products run in the model's type: how far they may take a bfloat16 result from the
    float32 one.
    """

    def __call__(self, arrays: dict[str, Tensor], seed: int) -> LossOutput:
        return self.function(
            *(arrays[name] for name in self.inputs), **self.options[seed % len(self.options)]
        )


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a problem lie: `slots[r, c]` is the token's number or -1, `rows[r]` the
    row's only sequence or -1.

    `rows` is None where rows are packed.
    """

    slots: Tensor
    segment_ids: Tensor
    rows: Tensor | None


def lay_out(
    problem: Problem,
    order: Sequence[int] | None = None,
    *,
    width: int = 0,
    left: Sequence[int] | None = None,
) -> Layout:
    """One sequence a row, in `order` (-1: an empty row), after `left` slots of padding, at least
    `width` wide.
    """
    order = range(problem.num_sequences) if order is None else order
    left = left or [0] * len(order)
    lengths = [0 if i < 0 else problem.lengths[i] for i in order]
    width = max([width, 1, *(a + b for a, b in zip(left, lengths, strict=True))])
    starts = problem.starts
    rows = []
    for i, begin, length in zip(order, left, lengths, strict=True):
        rows.append(
            [-1] * begin
            + list(range(starts[i], starts[i] + length))
            + [-1] * (width - begin - length)
        )
    slots = torch.tensor(rows)
    return Layout(slots, (slots >= 0).long(), torch.tensor(list(order)))


def arrays_in(case: Case, problem: Problem, layout: Layout) -> dict[str, Tensor]:
    """What the case reads of the problem, in this layout, with garbage in the padding."""
    generator = problem.generator(salt=layout.slots.numel())
    arrays = {}
    for name in dict.fromkeys((*case.inputs, "mask")):
        if name in problem.tokens:
            arrays[name] = _gather(problem.tokens[name], layout.slots, name, generator)
        elif name in problem.shared:
            arrays[name] = problem.shared[name]
        elif name == "segment_ids":
            arrays[name] = layout.segment_ids
        elif name == "ordered_cotangent":
            present = problem.tokens["sequence"][
                layout.slots[layout.slots >= 0]
            ].unique_consecutive()
            arrays[name] = problem.sequences["sequence_cotangent"][present]
        else:
            assert layout.rows is not None, (
                f"{name} is one number a sequence: it has no place in packed rows"
            )
            arrays[name] = _gather(problem.sequences[name], layout.rows, name, generator)
    return arrays


def _gather(values: Tensor, slots: Tensor, name: str, generator: torch.Generator) -> Tensor:
    taken, there = values[slots.clamp(min=0)], slots >= 0
    if bool(there.all()):
        return taken
    fill = taken.new_zeros(())
    if name not in ZERO_IN_PADDING:
        fill = (3 * torch.randn(taken.shape, generator=generator, dtype=torch.float64)).to(
            taken.dtype
        )
    there = there.reshape(slots.shape + (1,) * (taken.dim() - slots.dim()))
    return torch.where(there, taken, fill)


@dataclass(frozen=True)
class Result:
    """A loss, its gradient for each differentiable input, and its metrics as numbers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def evaluate(case: Case, problem: Problem, *layouts: Layout) -> Result:
    """The sum over the layouts (the shards of a batch), and its gradient for the problem's own
    arrays: one number a token, wherever it lay.
    """
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in _own_arrays(problem).items()
        if name in case.differentiable
    }
    leafy = problem.but(**leaves)
    output = reduce(add, [case(arrays_in(case, leafy, layout), problem.seed) for layout in layouts])
    return result_of(output, leaves)


def result_of(output: LossOutput, leaves: dict[str, Tensor]) -> Result:
    """Differentiate one output; a leaf that the loss doesn't reach is an error."""
    gradients = torch.autograd.grad(output.loss, list(leaves.values())) if leaves else ()
    return Result(
        output.loss.detach(), dict(zip(leaves, gradients, strict=True)), finalize(output.metrics)
    )


def _own_arrays(problem: Problem) -> dict[str, Tensor]:
    return problem.tokens | problem.sequences | problem.shared


def assert_same(
    one: Result, other: Result, *, rtol: float = 1e-8, atol: float = 1e-10, metric_tol: float = 1e-5
) -> None:
    """Equal loss, gradients and metrics up to the order of summation."""
    torch.testing.assert_close(other.loss, one.loss, rtol=rtol, atol=atol, check_dtype=False)
    for name, gradient in one.gradients.items():
        message = lambda text, n=name: f"gradient of {n}: {text}"  # noqa: E731
        torch.testing.assert_close(
            other.gradients[name], gradient, rtol=rtol, atol=atol, check_dtype=False, msg=message
        )
    assert_same_metrics(one.metrics, other.metrics, metric_tol)


def assert_same_metrics(
    one: dict[str, float], other: dict[str, float], tolerance: float = 1e-5
) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert abs(value - other[name]) <= tolerance * (1 + abs(value)), (
            f"metric {name}: {value} and {other[name]}"
        )


@contextmanager
def shapes_checked(on: bool) -> Iterator[None]:
    """With `on=False` without the checks of all annotations, as users run it: they refuse some
    wrong values before the code itself does.
    """
    jaxtyping.config.update("jaxtyping_disable", not on)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

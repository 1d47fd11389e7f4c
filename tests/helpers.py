"""Cases (a function and its options), evaluated in layouts (how sequences lie in a batch)."""

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
"""Arrays with zeros in padding, where all others have garbage."""
SHIFTED = ("logits", "hidden")
"""Arrays of a model's output, whose index t is about token t + 1."""


@dataclass(frozen=True)
class Case:
    """One function with its options; a call takes the arrays of a batch."""

    name: str
    function: Callable[..., LossOutput]
    inputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    """Variants; the example's seed chooses one."""
    family: str = "loss"
    masked_by: str = "mask"
    """What hides a slot: `mask`, or `segment` for functions that know padding only."""
    whole_groups: bool = False
    """A shard must hold all the sequences of a group."""
    half_rounding: float = 0.0
    """How far products in bfloat16 may take a result from the float32 one."""

    def __call__(self, arrays: dict[str, Tensor], seed: int) -> LossOutput:
        return self.function(
            *(arrays[name] for name in self.inputs), **self.options[seed % len(self.options)]
        )


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a problem lie: `slots[r, c]` is the token's number or -1, `rows[r]` the
    row's only sequence or -1 (None: rows are packed).
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
    """One sequence a row, in `order` (-1: an empty row), after `left` slots of padding."""
    order = range(problem.num_sequences) if order is None else order
    left = left or [0] * len(order)
    lengths = [0 if i < 0 else problem.lengths[i] for i in order]
    width = max([width, 1, *(a + b for a, b in zip(left, lengths, strict=True))])
    slots = torch.full((len(order), width), -1)
    for row, i, begin, length in zip(slots, order, left, lengths, strict=True):
        row[begin : begin + length] = problem.starts[i] + torch.arange(length)
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
            present = problem.tokens["sequence"][layout.slots[layout.slots >= 0]]
            arrays[name] = problem.sequences["sequence_cotangent"][present.unique_consecutive()]
        else:
            assert layout.rows is not None, f"{name}: packed rows have no number a sequence"
            arrays[name] = _gather(problem.sequences[name], layout.rows, name, generator)
    return arrays


def _gather(values: Tensor, slots: Tensor, name: str, generator: torch.Generator) -> Tensor:
    taken, there = values[slots.clamp(min=0)], slots >= 0
    if bool(there.all()):
        return taken
    fill = torch.zeros((), dtype=torch.float64)
    if name not in ZERO_IN_PADDING:
        fill = 3 * torch.randn(taken.shape, generator=generator, dtype=torch.float64)
    there = there.reshape(slots.shape + (1,) * (taken.dim() - slots.dim()))
    return torch.where(there, taken, fill.to(taken.dtype))


@dataclass(frozen=True)
class Result:
    """A loss, its gradient for each differentiable input, and its metrics as numbers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def evaluate(case: Case, problem: Problem, *layouts: Layout) -> Result:
    """The sum over the layouts (a batch's shards), and its gradient for the problem's arrays."""
    arrays = problem.tokens | problem.sequences | problem.shared
    leaves = {name: arrays[name].clone().requires_grad_() for name in case.differentiable}
    leafy = problem.but(**leaves)
    output = reduce(add, [case(arrays_in(case, leafy, layout), problem.seed) for layout in layouts])
    return result_of(output, leaves)


def result_of(output: LossOutput, leaves: dict[str, Tensor]) -> Result:
    gradients = torch.autograd.grad(output.loss, list(leaves.values())) if leaves else ()
    return Result(
        output.loss.detach(), dict(zip(leaves, gradients, strict=True)), finalize(output.metrics)
    )


def assert_same(
    one: Result, other: Result, *, rtol: float = 1e-8, atol: float = 1e-10, metric_tol: float = 1e-5
) -> None:
    for found, expected in ((other.loss, one.loss), (other.gradients, one.gradients)):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, check_dtype=False)
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
    """With `on=False` as users run it: without the checks of all annotations."""
    jaxtyping.config.update("jaxtyping_disable", not on)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

"""One comparison: a function of ours and one of a peer's on every batch of its kind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle import batches

TOLERANCE = 1e-5
"""Of |ours − theirs| / (1 + |theirs|), in float64; peers compute parts in float32."""


@dataclass(frozen=True)
class Row:
    """Ours and theirs, the input that gets a gradient, and the notes on where they differ."""

    ours: str
    peer: str
    theirs: str
    mine: Callable[[Any], Tensor]
    other: Callable[[Any], Tensor]
    notes: Sequence[str] = ()
    """Of `oracle.notes`, on where and why they differ."""
    leaf: str = "logprobs"
    kind: Callable[[], Iterator[tuple[str, Any]]] = batches.sequences
    value: bool = True
    """False: only the gradients are compared, as the values differ by definition."""


@dataclass(frozen=True)
class Found:
    """How far apart both sides are on the batches of one name."""

    value: float
    gradient: float
    error: str = ""

    @property
    def agrees(self) -> bool:
        return not self.error and max(self.value, self.gradient) <= TOLERANCE


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest |ours − theirs| / (1 + |theirs|); inf where only one is finite."""
    ours, theirs = torch.broadcast_tensors(ours.detach().double(), theirs.detach().double())
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = ((ours - theirs).abs() / (1 + theirs.abs())).nan_to_num(torch.inf, torch.inf)
    return float(torch.where(same, 0.0, apart).max()) if same.numel() else 0.0


def evaluate(function: Callable[[Any], Tensor], batch: Any, leaf: str) -> tuple[Tensor, Tensor]:
    """Return a function's value and the gradient of its sum with respect to `leaf`."""
    given = getattr(batch, leaf).clone().requires_grad_()
    value = function(replace(batch, **{leaf: given}))
    zero = torch.zeros_like(given)
    if not value.requires_grad:
        return value, zero
    (gradient,) = torch.autograd.grad(value.sum(), given, allow_unused=True)
    return value, zero if gradient is None else gradient


def compare(row: Row) -> dict[str, Found]:
    """Return what was found on each kind of batch."""
    found: dict[str, Found] = {}
    for name, batch in row.kind():
        ours, our_gradient = evaluate(row.mine, batch, row.leaf)
        try:
            theirs, their_gradient = evaluate(row.other, batch, row.leaf)
        except Exception as error:  # whatever a peer raises on a degenerate batch
            found[name] = Found(torch.inf, torch.inf, f"{type(error).__name__}: {error}")
            continue
        value = distance(ours, theirs) if row.value else 0.0
        gradient = distance(our_gradient, their_gradient)
        last = found.get(name, Found(0.0, 0.0))
        found[name] = Found(max(value, last.value), max(gradient, last.gradient))
    return found

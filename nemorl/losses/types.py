"""What a loss returns, and metrics that add up the same way however the batch was cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

Scalar = Float[Tensor, ""]


@dataclass(frozen=True)
class Mean:
    """A mean as its parts: `total / count`, which add over shards. An empty mean finalizes to 0.

    >>> (Mean(torch.tensor(6.0), torch.tensor(2.0)) + Mean(torch.tensor(0.0), torch.tensor(1.0))).finalize()
    2.0
    """

    total: Scalar
    count: Scalar

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def finalize(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True)
class Sum:
    """A sum over everything that was seen.

    >>> (Sum(torch.tensor(6.0)) + Sum(torch.tensor(2.0))).finalize()
    8.0
    """

    value: Scalar

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def finalize(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Max:
    """The largest value that was seen; -inf (nothing seen) finalizes to 0.

    >>> (Max(torch.tensor(6.0)) + Max(torch.tensor(2.0))).finalize()
    6.0
    """

    value: Scalar

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(self.value, other.value))

    def finalize(self) -> float:
        value = float(self.value)
        return 0.0 if value == float("-inf") else value


@dataclass(frozen=True)
class Min:
    """The smallest value that was seen; +inf (nothing seen) finalizes to 0.

    >>> (Min(torch.tensor(6.0)) + Min(torch.tensor(2.0))).finalize()
    2.0
    """

    value: Scalar

    def __add__(self, other: Min) -> Min:
        return Min(torch.minimum(self.value, other.value))

    def finalize(self) -> float:
        value = float(self.value)
        return 0.0 if value == float("inf") else value


Metric = Mean | Sum | Max | Min
Metrics = Mapping[str, Metric]


@dataclass(frozen=True)
class LossOutput:
    """A loss, already weighted (`Σ_t w_t ℓ_t`), and its metrics. Two outputs of two shards
    add to the whole's.

    >>> one = LossOutput(torch.tensor(1.0), {"n": Sum(torch.tensor(1.0))})
    >>> both = one + one
    >>> both.loss.item(), finalize(both.metrics)
    (2.0, {'n': 2.0})
    """

    loss: Scalar
    metrics: Metrics

    def __add__(self, other: LossOutput) -> LossOutput:
        return LossOutput(self.loss + other.loss, merge(self.metrics, other.metrics))


def _register(cls: type) -> None:
    names = [field.name for field in fields(cls)]

    def unflatten(values: Iterable[Any], _: Any) -> Any:
        instance: Any = object.__new__(
            cls
        )  # not the constructor: tree_map and vmap may put anything in the place of a tensor
        for name, value in zip(names, values, strict=True):
            object.__setattr__(instance, name, value)
        return instance

    pytree.register_pytree_node(
        cls,
        lambda node: ([getattr(node, name) for name in names], None),
        unflatten,
        serialized_type_name=f"nemorl.{cls.__name__}",
    )


for _class in (Mean, Sum, Max, Min, LossOutput):
    _register(_class)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Combine the metrics of two shards; a name that only one side has is kept.

    >>> finalize(merge({"x": Sum(torch.tensor(1.0))}, {"x": Sum(torch.tensor(2.0)), "y": Max(torch.tensor(3.0))}))
    {'x': 3.0, 'y': 3.0}
    """
    return {**a, **{name: a[name] + metric if name in a else metric for name, metric in b.items()}}  # type: ignore[operator]


def finalize(metrics: Metrics) -> dict[str, float]:
    """Metrics as plain numbers: the one place where the host waits for the device.

    >>> finalize({"x": Mean(torch.tensor(3.0), torch.tensor(2.0))})
    {'x': 1.5}
    """
    return {name: metric.finalize() for name, metric in metrics.items()}

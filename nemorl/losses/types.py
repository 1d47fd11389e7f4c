"""What a loss needs and returns, metrics that add up, and names of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from nemorl.checks import require

Scalar = Float[Tensor, ""]
PerToken = Float[Tensor, "batch seq"]
TokenMask = Bool[Tensor, "batch seq"]
TokenIds = Int[Tensor, "batch seq"]
PerResponse = Float[Tensor, "batch"]
ResponseMask = Bool[Tensor, "batch"]
ResponseIds = Int[Tensor, "batch"]
PerPair = Float[Tensor, "pairs"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a loss reads of the model's output; a backend computes nothing else.

    Without arguments: the log-probability of each token.

    >>> Needs(entropy=True).outputs
    ('token_logprobs', 'entropy')
    """

    entropy: bool = False
    """The entropy of each token's distribution, too."""
    values: bool = False
    """The values of a scalar head (`BackendConfig.head`), in place of log-probabilities."""

    def __post_init__(self) -> None:
        require(
            not (self.entropy and self.values),
            "needs.entropy",
            "can't be given together with values",
            True,
            "a scalar head has no distribution of tokens",
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors that a loss with these needs gets."""
        if self.values:
            return ("values",)
        return ("token_logprobs", "entropy") if self.entropy else ("token_logprobs",)


def needs(*, entropy: bool = False, values: bool = False) -> Callable[[Function], Function]:
    """Declare what a loss reads besides, or in place of, log-probabilities: set its attribute
    `needs`, in place. A loss without the attribute gets log-probabilities alone.

    >>> @needs(entropy=True)
    ... def loss(output, batch):
    ...     return entropy_bonus(output.entropy, batch.loss_weights, coef=1.0)
    >>> needs_of(loss)
    Needs(entropy=True, values=False)
    """
    wanted = Needs(entropy=entropy, values=values)

    def declare(loss_fn: Function) -> Function:
        try:
            loss_fn.needs = wanted  # type: ignore[attr-defined]
        except AttributeError as error:
            raise ValueError(
                "the loss must be a function, or an object that takes attributes, but it is"
                f" {loss_fn!r}: decorate a method in its class, or give functools.partial(method)"
            ) from error
        return loss_fn

    return declare


def needs_of(loss_fn: Callable[..., Any]) -> Needs:
    """Return what a loss reads of the model's output: its attribute `needs`, or the default.

    >>> needs_of(lambda output, batch: LossOutput(output.token_logprobs.sum(), {}))
    Needs(entropy=False, values=False)
    """
    while isinstance(loss_fn, partial) and not hasattr(loss_fn, "needs"):
        loss_fn = loss_fn.func
    found = getattr(loss_fn, "needs", Needs())
    remedy = "declare it with @nemorl.needs(…)"
    require(isinstance(found, Needs), "the loss's needs", "must be a Needs", found, remedy)
    return found


@dataclass(frozen=True)
class Mean:
    """A mean as total and count, which add over shards. An empty mean finalizes to 0.

    >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
    >>> (Mean(3 * two, two) + Mean(0 * one, one)).finalize()
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
    """A sum over everything."""

    value: Scalar

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def finalize(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Max:
    """A maximum; -inf (no value) finalizes to 0."""

    value: Scalar

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(self.value, other.value))

    def finalize(self) -> float:
        value = float(self.value)
        return 0.0 if value == float("-inf") else value


@dataclass(frozen=True)
class Min:
    """A minimum; +inf (no value) finalizes to 0."""

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
    """A weighted loss Σ_t w_t·ℓ_t and its metrics; outputs of two shards add up to the whole's.

    >>> one = LossOutput(torch.tensor(1.0), {"n": Sum(torch.tensor(1.0))})
    >>> both = one + one
    >>> both.loss.item(), finalize(both.metrics)
    (2.0, {'n': 2.0})
    """

    loss: Scalar
    metrics: Metrics

    def __add__(self, other: LossOutput) -> LossOutput:
        return LossOutput(self.loss + other.loss, merge(self.metrics, other.metrics))


def register_pytree(cls: type, *, constant: str = "") -> None:
    """Register a frozen dataclass as a pytree: all fields but `constant` are its leaves.

    >>> pytree.tree_map(lambda leaf: leaf + 1, Sum(torch.tensor(1.0)))  # registered below
    Sum(value=tensor(2.))
    """
    names = [field.name for field in fields(cls) if field.name != constant]

    def flatten(node: Any) -> tuple[list[Any], Any]:
        return [getattr(node, name) for name in names], getattr(node, constant, None)

    def unflatten(values: Iterable[Any], context: Any) -> Any:
        # tree_map and vmap may put anything in a tensor's place
        instance: Any = object.__new__(cls)
        for name, value in (*zip(names, values, strict=True), (constant, context)):
            if name:
                object.__setattr__(instance, name, value)
        return instance

    name = f"nemorl.{cls.__name__}"
    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)


for _class in (Mean, Sum, Max, Min, LossOutput):
    register_pytree(_class)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Return the metrics of two shards combined; a name that only one side has is kept.

    Raises: ValueError for a name that has metrics of two kinds.

    >>> one, two = Sum(torch.tensor(1.0)), Sum(torch.tensor(2.0))
    >>> finalize(merge({"x": one}, {"x": two, "y": two}))
    {'x': 3.0, 'y': 2.0}
    """
    both: dict[str, Any] = {}
    for name in b:
        if name in a:
            kind, other = type(a[name]).__name__, type(b[name]).__name__
            requirement = f"must be a {kind} as in the other shard"
            require(kind == other, f"metric {name}", requirement, other, "give it another name")
            both[name] = a[name] + b[name]  # type: ignore[operator]
    return {**a, **b, **both}


def finalize(metrics: Metrics) -> dict[str, float]:
    """Return metrics as plain numbers; the host waits for the device.

    >>> finalize({"x": Mean(torch.tensor(3.0), torch.tensor(2.0))})
    {'x': 1.5}
    """
    return {name: metric.finalize() for name, metric in in_main_memory(metrics).items()}


def in_main_memory(metrics: Metrics) -> Metrics:
    """Return metrics with their tensors in main memory; the host waits for the device once.

    >>> in_main_memory({"x": Sum(torch.tensor(3.0))})
    {'x': Sum(value=tensor(3.))}
    """
    leaves, spec = pytree.tree_flatten(dict(metrics))
    away = [x for x in leaves if x.device.type != "cpu"]
    # As float64: a user's whole numbers stay exact beside float32.
    here = iter(torch.stack([x.detach().double().reshape(()) for x in away]).cpu() if away else ())
    found = [x.detach() if x.device.type == "cpu" else next(here) for x in leaves]
    return pytree.tree_unflatten(found, spec)

"""What a loss needs and returns, metrics that add up, and names of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
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
    top_k: int = 0
    """Of how many of the likeliest tokens at each place their ids, log-probabilities and the log of
    the mass outside them, too.
    """
    targets: bool = False
    """The log-probabilities of `TokenBatch.target_ids` [batch, seq, k] and the log of the mass
    outside them, too.
    """

    def __post_init__(self) -> None:
        for name in ("entropy", "top_k", "targets"):
            value = getattr(self, name)
            require(
                not (value and self.values),
                f"needs.{name}",
                "can't be given together with values",
                value,
                "a scalar head has no distribution of tokens",
            )
        require(
            self.top_k >= 0,
            "needs.top_k",
            "must be a number of tokens, at least 0",
            self.top_k,
            "0 asks for none",
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors that a loss with these needs gets."""
        if self.values:
            return ("values",)
        wanted = {
            ("token_logprobs",): True,
            ("entropy",): self.entropy,
            ("top_ids", "top_logprobs", "top_rest_logprobs"): self.top_k > 0,
            ("target_logprobs", "target_rest_logprobs"): self.targets,
        }
        return tuple(name for names, is_wanted in wanted.items() if is_wanted for name in names)


def needs(
    *, entropy: bool = False, values: bool = False, top_k: int = 0, targets: bool = False
) -> Callable[[Function], Function]:
    """Declare what a loss reads besides, or in place of, log-probabilities: set its attribute
    `needs`, in place. A loss without the attribute gets log-probabilities alone.

    >>> @needs(entropy=True)
    ... def loss(output, batch):
    ...     return entropy_bonus(output.entropy, batch.loss_weights, coef=1.0)
    >>> needs_of(loss).outputs
    ('token_logprobs', 'entropy')
    """
    wanted = Needs(entropy=entropy, values=values, top_k=top_k, targets=targets)

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
    Needs(entropy=False, values=False, top_k=0, targets=False)
    """
    while isinstance(loss_fn, partial) and not hasattr(loss_fn, "needs"):
        loss_fn = loss_fn.func
    found = getattr(loss_fn, "needs", Needs())
    require(
        isinstance(found, Needs),
        "the loss's needs",
        "must be a Needs",
        found,
        "declare it with @nemorl.needs(…)",
    )
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
            require(
                kind == other,
                f"metric {name}",
                f"must be a {kind} as in the other shard",
                other,
                "give it another name",
            )
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


def at_least_float32(values: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `values` as float32, or as they are if float64: the type of all reductions.

    >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values if values.dtype == torch.float64 else values.float()


def same_segment(segment_ids: TokenIds) -> TokenMask:
    """Return True where a token and the one before it are of one sequence: it is predicted.

    >>> same_segment(torch.tensor([[1, 1, 2, 2, 2, 0]])).int().tolist()
    [[0, 1, 0, 1, 1, 0]]
    """
    return (segment_ids > 0) & (segment_ids == pad(segment_ids[:, :-1], (1, 0)))


def segment_starts(segment_ids: TokenIds) -> TokenMask:
    """Return True at the first token of every sequence.

    >>> segment_starts(torch.tensor([[1, 1, 2, 2, 2, 0]])).int().tolist()
    [[1, 0, 1, 0, 0, 0]]
    """
    return (segment_ids > 0) & ~same_segment(segment_ids)


def segment_totals(
    values: Shaped[Tensor, "batch seq"], segment_ids: TokenIds
) -> Float[Tensor, "batch segments"]:
    """Return the sum over every sequence of a row: column s for segment s, column 0 for padding.

    >>> segment_totals(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[1, 1, 2, 0]])).tolist()
    [[8.0, 3.0, 4.0, 0.0, 0.0]]
    """
    values = at_least_float32(values)
    return values.new_zeros(values.shape[0], values.shape[1] + 1).scatter_add(
        1, segment_ids.long(), values
    )


def segment_sum(
    values: Shaped[Tensor, "batch seq"], segment_ids: TokenIds | None = None
) -> PerToken:
    """Return at every token the sum of `values` over its sequence, 0 on padding.

    Mask `values` first.

    >>> segment_sum(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[1, 1, 2, 0]])).tolist()
    [[3.0, 3.0, 4.0, 0.0]]
    """
    if segment_ids is None:
        return at_least_float32(values).sum(-1, keepdim=True).expand(values.shape)
    sums = segment_totals(values, segment_ids).gather(1, segment_ids.long())
    return torch.where(segment_ids > 0, sums, 0.0)


def segment_mean(
    values: PerToken, mask: TokenMask, segment_ids: TokenIds | None = None
) -> PerToken:
    """Return at every token the mean of `values` over its sequence's masked tokens, else 0.

    >>> values = torch.tensor([[1.0, 3.0, 4.0, float("nan")]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> segment_mean(values, mask, torch.tensor([[1, 1, 2, 2]])).tolist()
    [[2.0, 2.0, 4.0, 4.0]]
    """
    total = segment_sum(torch.where(mask, values, 0.0), segment_ids)
    return total / segment_sum(mask, segment_ids).clamp(min=1)


def group_labels(group_id: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return any integer labels as labels below the number of elements, to scatter by.

    >>> group_labels(torch.tensor([70, -3, 70, 9])).tolist()
    [2, 0, 2, 1]
    """
    flat = group_id.flatten().contiguous()
    return torch.searchsorted(flat.sort().values, flat).reshape(group_id.shape)


def group_sum(
    values: Shaped[Tensor, "*shape"], labels: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return at every element the sum of `values` over its group; `labels` are of `group_labels`.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), group_labels(torch.tensor([70, -3, 70]))).tolist()
    [5.0, 2.0, 5.0]
    """
    flat, index = at_least_float32(values).flatten(), labels.flatten()
    return torch.zeros_like(flat).scatter_add(0, index, flat)[index].reshape(values.shape)


def group_extremes(
    values: Shaped[Tensor, "*shape"], labels: Int[Tensor, "*shape"]
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """Return at every element the smallest and the largest of `values` in its group.

    >>> low, high = group_extremes(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]))
    >>> low.tolist(), high.tolist()
    ([1.0, 2.0, 1.0], [4.0, 2.0, 4.0])
    """
    flat, index = values.flatten(), labels.flatten()
    low = flat.scatter_reduce(0, index, flat, "amin", include_self=False)
    high = flat.scatter_reduce(0, index, flat, "amax", include_self=False)
    return low[index].reshape(values.shape), high[index].reshape(values.shape)


MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp of log ratios, bounded at e²⁰ (verl's bound), above which the gradient is 0.

    A gradient's norm overflows in float32 at e⁴⁴.

    >>> bounded_exp(torch.tensor([0.0, 100.0]))
    tensor([1.0000e+00, 4.8517e+08])
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def masked(
    mask: Bool[Tensor, "*shape"], values: Float[Tensor, "*shape"], fill: float = 0.0
) -> Float[Tensor, "*shape"]:
    """Return `values` where `mask`, `fill` elsewhere, in float32 at least.

    Every loss does this to every input first: a masked slot is unseen, its gradient exactly 0.

    >>> masked(torch.tensor([True, False]), torch.tensor([2.0, float("nan")]))
    tensor([2., 0.])
    """
    return torch.where(mask, at_least_float32(values), fill)


def weighted_sum(loss_weights: Float[Tensor, "*shape"], losses: Float[Tensor, "*shape"]) -> Scalar:
    """Return Σ w·ℓ over the slots with w ≠ 0.

    >>> weighted_sum(torch.tensor([0.5, 0.0]), torch.tensor([2.0, float("inf")]))
    tensor(1.)
    """
    return (at_least_float32(loss_weights) * masked(loss_weights != 0, losses)).sum()


def mean_of(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Mean:
    """Return the mean over `mask` as a metric.

    >>> mean_of(torch.tensor([2.0, 4.0, 9.0]), torch.tensor([True, True, False])).finalize()
    3.0
    """
    kept = masked(mask, values.detach())
    return Mean(kept.sum(), mask.sum().to(kept.dtype))


def share_of(condition: Bool[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Mean:
    """Return the share of `mask` on which `condition` holds, as a metric.

    >>> share_of(torch.tensor([True, False]), torch.tensor([True, True])).finalize()
    0.5
    """
    return Mean((condition & mask).sum().float(), mask.sum().float())


def max_of(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Max:
    """Return the maximum over `mask` as a metric; -inf if it is empty.

    >>> max_of(torch.tensor([2.0, 4.0, 9.0]), torch.tensor([True, True, False])).finalize()
    4.0
    """
    kept = masked(mask, values.detach(), float("-inf"))
    return Max(kept.max() if kept.numel() else kept.new_full((), float("-inf")))


def min_of(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Min:
    """Return the minimum over `mask` as a metric; +inf if it is empty.

    >>> min_of(torch.tensor([2.0, 4.0, 1.0]), torch.tensor([True, True, False])).finalize()
    2.0
    """
    kept = masked(mask, values.detach(), float("inf"))
    return Min(kept.min() if kept.numel() else kept.new_full((), float("inf")))


def require_all(condition: Bool[Tensor, "*shape"], message: str) -> None:
    """Raise a ValueError unless all of `condition` holds; on a GPU, an assertion of the device.

    >>> require_all(torch.tensor([True, False]), "k must be above 0")
    Traceback (most recent call last):
    ValueError: k must be above 0
    """
    if torch.compiler.is_compiling() or condition.device.type != "cpu":
        torch._assert_async(condition.all(), message)
    elif not torch._C._functorch.is_functorch_wrapped_tensor(condition) and not condition.all():
        raise ValueError(message)


def require_one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names the field, its value and the choices.

    >>> require_one_of("level", "word", ("token", "sequence"))
    Traceback (most recent call last):
    ValueError: level must be one of 'token', 'sequence', but it is 'word'.
    """
    if value not in choices:
        raise ValueError(
            f"{field} must be one of {', '.join(map(repr, choices))}, but it is {value!r}."
        )

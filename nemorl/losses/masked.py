"""What every loss shares: masking, weighted sums, metrics."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.losses.segments import at_least_float32
from nemorl.losses.types import Max, Mean, Min, Scalar

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
    mask = loss_weights != 0
    return (at_least_float32(loss_weights) * masked(mask, losses)).sum()


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

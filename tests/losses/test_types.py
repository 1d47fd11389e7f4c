"""Metrics: what an empty one is, and how they merge."""

import torch

from nemorl.losses.types import (
    LossOutput,
    Max,
    Mean,
    Min,
    Sum,
    finalize,
    masked,
    max_of,
    mean_of,
    merge,
    min_of,
    share_of,
    weighted_sum,
)

INF = float("inf")


def number(value: float) -> torch.Tensor:
    return torch.tensor(value)


def test_metrics_that_saw_nothing_are_zero():
    empty = torch.zeros(0)
    nothing = empty.bool()
    metrics = [of(empty, nothing) for of in (mean_of, max_of, min_of)]
    assert not any(metric.finalize() for metric in (*metrics, share_of(nothing, nothing)))
    # An infinity that was seen is not hidden.
    assert Max(number(INF)).finalize() == INF and Min(number(-INF)).finalize() == -INF


def test_metrics_add_up():
    left = {
        "mean": Mean(number(6.0), number(2.0)),
        "sum": Sum(number(1.0)),
        "max": Max(number(-3.0)),
        "min": Min(number(-3.0)),
        "left": Sum(number(5.0)),
    }
    right = {
        "mean": Mean(number(0.0), number(1.0)),
        "sum": Sum(number(2.0)),
        "max": Max(number(-4.0)),
        "min": Min(number(-4.0)),
    }
    expected = {"mean": 2.0, "sum": 3.0, "max": -3.0, "min": -4.0, "left": 5.0}
    assert finalize(merge(left, right)) == finalize(merge(right, left)) == expected
    both = LossOutput(number(1.0), left) + LossOutput(number(2.0), right)
    assert both.loss.item() == 3.0 and finalize(both.metrics) == expected


def test_masked_values_are_cut_off_in_float32():
    values = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16).requires_grad_()
    mask = torch.tensor([True, False])
    assert masked(mask, values).tolist() == [1.0, 0.0]
    assert masked(mask, values, 7.0).tolist() == [1.0, 7.0]
    assert masked(mask, values).dtype == torch.float32
    assert masked(mask, values.double()).dtype == torch.float64
    weights = torch.tensor([0.1, 0.0], dtype=torch.bfloat16)
    total = weighted_sum(weights, values)
    assert total.dtype == torch.float32 and total.item() == weights[0].item()
    assert torch.autograd.grad(total, values)[0].tolist() == [weights[0].item(), 0.0]


def test_what_is_read_from_a_device_is_exact(accelerator: torch.device):
    """Also a whole number, which a type check would refuse, beside float32."""
    count = object.__new__(Sum)
    object.__setattr__(count, "value", torch.tensor(2**24 + 1, device=accelerator))
    mean = Mean(*(torch.tensor(x, device=accelerator) for x in (2.5, 2.0)))
    found = finalize({"count": count, "mean": mean, "here": Sum(torch.tensor(3.0))})
    assert found == {"count": 2**24 + 1, "mean": 1.25, "here": 3.0}

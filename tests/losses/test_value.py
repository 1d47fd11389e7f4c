"""The critic's loss by hand, and the explained variance of merged metrics."""

import pytest
import torch

from nemorl.losses.types import LossOutput, finalize
from nemorl.losses.value import explained_variance, value_loss

NAN = float("nan")


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 0.5, 2.0, -2.0),  # not moved: ½ · 2²
        (1.25, 1.0, 3.0, 0.5, 0.5 * 1.75**2, -1.75),  # moved a little
        (2.0, 1.0, 3.0, 0.5, 0.5 * 1.5**2, 0.0),  # too far towards the target: held at 1.5
        (0.0, 1.0, 3.0, 0.5, 0.5 * 3.0**2, -3.0),  # too far away: the larger is the unclipped
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
        (0.0, 1.0, -1.0, 0.5, 0.5 * 1.5**2, 0.0),  # the same downwards
        (1.25, 1.0, 0.0, 0.5, 0.5 * 1.25**2, 1.25),
    ],
)
def test_by_hand(value, old, target, clip, loss, slope):
    values = row(value).requires_grad_()
    output = value_loss(values, row(old), row(target), row(1.0), clip=clip)
    assert output.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(output.loss, values)[0].item() == pytest.approx(slope)


def test_metrics_by_hand():
    metrics = finalize(
        value_loss(
            row(2.0, 1.0, NAN), row(1.0, 1.0, NAN), row(3.0, 2.0, NAN), row(0.5, 0.5, 0.0), clip=0.5
        ).metrics
    )
    assert metrics == {
        "value_clip_fraction": 0.5,
        "value_mean": 1.5,
        "return_mean": 2.5,
        "return_square_mean": 6.5,
        "value_error_mean": 1.0,
        "value_error_square_mean": 1.0,
    }
    assert explained_variance(metrics) == 1.0  # off by a constant: all of the variance is explained


def test_explained_variance_of_equal_returns_is_zero():
    assert (
        explained_variance(
            finalize(value_loss(row(1.0, 2.0), row(1.0, 2.0), row(0.5, 0.5), row(1.0, 1.0)).metrics)
        )
        == 0.0
    )


def test_explained_variance_of_large_returns_does_not_cancel():
    """Returns of 1000 ± 0.1, in shards, and a critic that is worse than their mean."""
    random = torch.Generator().manual_seed(0)
    returns = 1000 + 0.1 * torch.randn(16, 64, generator=random)
    values = returns + 0.11 * torch.randn(16, 64, generator=random)
    total = LossOutput(torch.zeros(()), {})
    for v, g in zip(values.split(1), returns.split(1), strict=True):
        total += value_loss(v, v, g, torch.ones_like(v))
    exact, error = returns.double(), (returns - values).double()
    expected = 1 - error.var(correction=0) / exact.var(correction=0)
    assert expected < -0.1
    assert explained_variance(finalize(total.metrics)) == pytest.approx(expected.item(), rel=1e-5)


def test_rounding_is_neither_clipping_nor_variance():
    random = torch.Generator().manual_seed(0)
    old, returns = 10 * torch.randn(2, 1, 4000, generator=random)
    values = old + 0.19 * (2 * torch.rand(1, 4000, generator=random) - 1)
    output = value_loss(values, old, returns, torch.ones_like(old), clip=0.2)
    assert finalize(output.metrics)["value_clip_fraction"] == 0
    same = torch.full_like(old, 1000.1)
    assert explained_variance(finalize(value_loss(values, old, same, same).metrics)) == 0.0

"""The negative log-likelihood: a worked example, and agreement with torch's cross-entropy."""

import math

import pytest
import torch

from nemorl.losses.supervised import nll
from nemorl.losses.types import finalize

NAN = float("nan")


def test_by_hand():
    logprobs = torch.tensor([[0.5, 0.25, NAN]]).log().requires_grad_()
    output = nll(logprobs, torch.tensor([[0.5, 0.25, 0.0]]))
    assert output.loss.item() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(4))
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == [[-0.5, -0.25, 0.0]]
    assert finalize(output.metrics) == pytest.approx(
        {"nll": 1.5 * math.log(2), "token_probability": 0.375, "num_tokens": 2.0}
    )
    assert all(
        value.dtype == torch.float32
        for metric in output.metrics.values()
        for value in vars(metric).values()
    )


def test_dynamic_is_the_papers_over_several_steps():
    """Σ w · −sg(π) · log π, of tokens that are likely, impossible and untrained: slope −w·π."""
    now, w = torch.tensor([[-0.01, -1.0, -200.0, NAN]]), torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    for _ in range(3):
        now = now.detach().requires_grad_()
        output, known = nll(now, w, dynamic=True), now.detach()[:, :3]
        expected = w[:, :3] * known.exp()
        torch.testing.assert_close(output.loss, -(expected * known).sum())
        (slope,) = torch.autograd.grad(output.loss, now)
        torch.testing.assert_close(slope[:, :3], -expected)
        assert slope[0, 3] == 0 and finalize(output.metrics) == finalize(nll(now, w).metrics)
        now = now - slope


def test_is_torchs_cross_entropy():
    logits, ids = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(nll(logprobs, torch.full((2, 5), 0.1)).loss, expected)

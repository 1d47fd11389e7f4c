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


def test_is_torchs_cross_entropy():
    logits, ids = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(nll(logprobs, torch.full((2, 5), 0.1)).loss, expected)

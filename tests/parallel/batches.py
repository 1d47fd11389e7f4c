"""Batches of random sequences for training tests."""

import os
from dataclasses import replace

import torch

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput
from nemorl.parallel.backend import ForwardOutput
from tests.tiny_models import ALPHABET

DEVICE = os.environ.get("NEMORL_TEST_DEVICE", "cpu")
"""Where the conformance suite and the parity cases train; `python -m benchmarks.gpu` sets cuda."""


def random_batch(lengths: list[int], *, seed: int = 0) -> TokenBatch:
    """Sequences of these lengths; from the second token on, about two thirds of the tokens are
    trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in lengths:
        ids = torch.randint(2, len(ALPHABET) + 2, (length,), generator=generator).tolist()
        mask = [False, *(torch.rand(length - 1, generator=generator) < 0.67).tolist()]
        examples.append(
            Example(input_ids=ids, loss_mask=mask, response_mask=[False] + [True] * (length - 1))
        )
    batch = collate(examples)
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))


def nll_loss(output: ForwardOutput, batch: TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    return nll(output.token_logprobs, batch.loss_weights)

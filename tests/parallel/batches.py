"""Batches of random sequences for training tests."""

import os
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput
from nemorl.parallel.backend import ForwardOutput
from tests.tiny_models import ALPHABET

DEVICE = os.environ.get("NEMORL_TEST_DEVICE", "cpu")
"""Where the conformance suite and the parity cases train; `python -m benchmarks.gpu` sets cuda."""
LENGTHS = [9, 2, 30, 17, 1, 30, 5, 12]
ATOL = 2e-6 if DEVICE == "cpu" else 5e-6
LAYOUTS = {
    "all at once": {},
    "one row": {"train_micro_batch_size": 1},
    "three rows": {"train_micro_batch_size": 3},
    "token budget": {"micro_batch_tokens": 45},
    "packed": {"sequence_packing": True},
    "packed wide": {"sequence_packing": True, "packed_row_tokens": 64, "train_micro_batch_size": 1},
    "packed budget": {"sequence_packing": True, "micro_batch_tokens": 40},
    "checkpointed": {"activation_checkpointing": "full"},
    "small chunks": {"logprob_chunk": 7},
}


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


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
"""For each group the length of its prompt, and those of its responses."""


def grouped(groups: Any, *, seed: int = 0, letters: int = len(ALPHABET)) -> TokenBatch:
    generator, examples = torch.Generator().manual_seed(seed), []

    def tokens(count: int) -> list[int]:
        return torch.randint(2, letters + 2, (count,), generator=generator).tolist()

    for length, responses in groups:
        prompt = tokens(length)
        for count in responses:
            ids, response = [*prompt, *tokens(count)], [False] * length + [True] * count
            trained = [r and bool(torch.rand((), generator=generator) < 0.8) for r in response]
            examples.append(Example(input_ids=ids, loss_mask=trained, response_mask=response))
    batch = collate(examples)
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))

"""Weights that change while engines have requests in flight, and whose tokens these get."""

from collections.abc import Callable
from typing import Any

import torch

from nemorl.models.adapters import merged_tensors
from nemorl.rollout.generation import Completion, WeightSource
from tests.runtime.engines.shared import small_model

PROMPTS = [[2 + (i * j) % 39 for i in range(70)] for j in range(1, 9)]
"""Of more than two blocks of the cache, which their samples share."""
OLD, NEW = (small_model(seed=seed, scale=3.0, max_position_embeddings=512) for seed in range(2))


class Source(WeightSource):
    """New weights, of which all but the first come after a call of `meanwhile`, if they are read
    for the first time.
    """

    def __init__(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def newest(self) -> Any:
        def tensors() -> Any:
            found = iter(merged_tensors(NEW))
            yield next(found)
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
            yield from found

        return 1, tensors()


@torch.no_grad()
def assert_of(model: Any, prompt: list[int], answer: Completion, places: slice) -> None:
    """These tokens have the logprobs of a model that has computed all tokens before them."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    found = torch.tensor(answer.logprobs)
    torch.testing.assert_close(found[places], expected[places], rtol=0, atol=2e-5)

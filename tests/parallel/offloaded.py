"""What both backends do in tests of what is in main memory while engines generate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemorl.losses.types import finalize
from tests.parallel.batches import nll_loss, random_batch

FIRST, SECOND = random_batch([9, 2, 30, 17]), random_batch([4, 12], seed=1)


def generations(
    backend: Any, held: Callable[[Any], dict[str, int]], *, offloads: bool, keep: bool
) -> tuple[dict[str, Any], list[dict[str, int]], Callable[[], dict[str, Tensor]]]:
    """Take two steps with generation between them, of which one is amid an accumulation.

    held: returns bytes on the device, by what they are.
    Returns: all numbers; what was held in generations, and, as the second one, after a step; and a
        function that generates once more.
    """
    found: dict[str, Any] = {}
    sizes: list[dict[str, int]] = []

    def generate() -> dict[str, Tensor]:
        if offloads:
            backend.offload(keep_weights=keep)
            sizes.append(held(backend))
        weights = {name: tensor.clone() for name, tensor in backend.weights()}
        if offloads:
            assert held(backend) == sizes[-1]
        return weights

    found["initial"] = generate()
    found["metrics"] = [finalize(backend.train_step(FIRST, nll_loss))["loss"]]
    sizes.append(held(backend))
    found["weights"] = generate()
    found["cast"] = {name: x.clone() for name, x in backend.weights(torch.bfloat16)}
    found["logprobs"] = backend.get_logprobs(FIRST).values
    if backend.config.keep_reference:
        generate()
        found["reference"] = backend.get_reference_logprobs(FIRST).values
    backend.forward_backward(FIRST, nll_loss)
    generate()
    backend.forward_backward(SECOND, nll_loss)
    generate()
    found["metrics"].append(finalize(backend.optim_step())["grad_norm"])
    return found, sizes, generate

"""What both backends do in tests of what is in main memory while engines generate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemorl.losses.types import finalize
from nemorl.parallel.accumulation import local_part
from nemorl.parallel.dtensor.backend import DTensorBackend
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import weights

FIRST, SECOND = random_batch([9, 2, 30, 17]), random_batch([4, 12], seed=1)


def generations(
    backend: Any, held: Callable[[Any], dict[str, int]], *, offloads: bool, keep: bool
) -> tuple[dict[str, Any], list[dict[str, int]], Callable[[], dict[str, Tensor]]]:
    """Take two steps with generation between them, of which one is amid an accumulation."""
    found: dict[str, Any] = {}
    sizes: list[dict[str, int]] = []

    def generate() -> dict[str, Tensor]:
        if offloads:
            backend.offload(keep_weights=keep)
            sizes.append(held(backend))
        found = weights(backend)
        if offloads:
            assert held(backend) == sizes[-1]
        return found

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


def held(backend: DTensorBackend) -> dict[str, int]:

    def size(tensors: Any) -> int:
        parts = (local_part(x) for x in tensors if isinstance(x, Tensor))
        return sum(
            {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in parts}.values()
        )

    assert backend._model is not None
    parameters = list(backend._model.parameters())
    kept = backend.optimizer.state.values() if backend.config.trains else ()
    states = [x for state in kept for x in state.values()]
    reference = backend._reference
    return {
        "parameters": size(parameters),
        "gradients": size(p.grad for p in parameters),
        "optimizer": size(states),
        "reference": size(reference.parameters()) if reference is not None else 0,
    }


def held_by_megatron(backend: Any) -> dict[str, int]:

    def size(tensors: Any) -> int:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({each._cdata: each.nbytes() for each in storages}.values())

    found, optimizer = {"parameters": size(backend._stages.parameters())}, backend.optimizer
    if backend._reference is not None:
        found["reference"] = size(backend._reference.parameters())
    if optimizer is not None:
        trained = list(backend._stages.parameters())
        spans = [optimizer.main(p) for p in trained if optimizer.span(p) is not None]
        found |= {
            "spans": size(spans),
            "gradients": size(p.main_grad for p in trained),
            "of spans": size(span.grad for span in spans if span.grad is not None),
            "moments": size(x for p in trained for x in optimizer.state(p).values()),
        }
    return found

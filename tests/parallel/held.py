"""What of a model is on its device."""

from typing import Any

from torch import Tensor

from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.offload import local_part


def held(backend: DTensorBackend) -> dict[str, int]:
    """Bytes on the device, by what they are."""

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

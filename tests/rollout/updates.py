"""New weights for a generation backend."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nemorl.rollout.calls import blocking
from nemorl.rollout.generation import Weights


def update(
    backend: Any, tensors: Iterable[tuple[str, Tensor]], version: int, **options: Any
) -> int:
    """Have the backend take these weights, and wait for it."""
    source = Weights(version=version, tensors=tensors)
    return blocking(backend.update_weights(source, **options))

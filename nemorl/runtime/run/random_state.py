"""The state of every global random generator, as values that a file without pickle holds."""

import random
from typing import Any

import numpy as np
import torch

RandomState = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""Of every global random generator, as JSON values and as tensors."""


def random_state() -> RandomState:
    """The present state of every global random generator."""
    version, internal, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    values = {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached_gaussian],
    }
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU should not wake the GPUs of its machine
        tensors |= {
            f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())
        }
    return values, tensors


def restore_generators(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The inverse; GPUs that this machine doesn't have are passed over."""
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached_gaussian = values["numpy"]
    np.random.set_state(
        (kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian)
    )
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)

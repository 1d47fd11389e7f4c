"""The state of the global random generators of Python, numpy and torch, without pickle."""

import random
from typing import Any

import numpy as np
import torch

RandomState = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""JSON values of Python's and numpy's generators, and tensors of torch's."""


def seed_generators(seed: int) -> None:
    """Seed every global random generator, from which rewards and environments may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> RandomState:
    """Return the present state of every global random generator."""
    kind, keys, *rest = np.random.get_state()
    values = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU should not wake the GPUs of its machine
        states = torch.cuda.get_rng_state_all()
        tensors |= {f"cuda:{index}": state for index, state in enumerate(states)}
    return values, tensors


def restore_generators(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Set the generators to a `random_state`, but not generators of GPUs that are not here."""
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)

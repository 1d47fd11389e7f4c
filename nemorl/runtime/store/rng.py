"""The state of the global random generators of Python, numpy and torch, without pickle."""

import random
from typing import Any, NamedTuple

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed every global random generator, from which rewards and environments may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RandomState(NamedTuple):
    """The state of every global random generator."""

    values: dict[str, Any]
    """JSON values of Python's and numpy's generators."""
    tensors: dict[str, torch.Tensor]
    """States of torch's generators, by device."""

    @classmethod
    def now(cls) -> "RandomState":
        """Return the present state."""
        kind, keys, *rest = np.random.get_state()
        values = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
        tensors = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # a run on the CPU should not wake the GPUs of its machine
            states = torch.cuda.get_rng_state_all()
            tensors |= {f"cuda:{index}": state for index, state in enumerate(states)}
        return cls(values, tensors)

    def restore(self) -> None:
        """Set the generators to this state, but not generators of GPUs that are not here."""
        version, internal, gauss_next = self.values["python"]
        random.setstate((version, tuple(internal), gauss_next))
        kind, keys, *rest = self.values["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(self.tensors["cpu"])
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in self.tensors:
                torch.cuda.set_rng_state(self.tensors[f"cuda:{index}"], index)

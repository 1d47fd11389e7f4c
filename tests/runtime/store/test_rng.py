"""The global random generators."""

import random

import numpy as np
import pytest
import torch

from nemorl.runtime.store.checkpoint import RandomState, seed_generators


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_a_seed_is_that_of_every_generator(seed: int):
    before = RandomState.now()
    try:
        seed_generators(seed)
        first = draws()
        other = draws()
        seed_generators(seed)
        assert draws() == first
        assert all(a != b for a, b in zip(first, other, strict=True))
        seed_generators(seed + 1)
        assert all(a != b for a, b in zip(first, draws(), strict=True))
    finally:
        before.restore()

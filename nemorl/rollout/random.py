"""Random numbers of a request, by its seed and position alone."""

from typing import TypeVar

from jaxtyping import Float64, Int64
from torch import Tensor

Bits = TypeVar("Bits", int, Int64[Tensor, "batch"])
"""64 bits: the lowest ones of an int."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Bits, bits: int) -> Bits:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64 shifts keep the sign


def _mix(x: Bits) -> Bits:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream(seed: Int64[Tensor, "batch"], number: Int64[Tensor, "batch"]) -> Int64[Tensor, "batch"]:
    """Return a stream of random numbers for each (seed of a request, number of a sample)."""
    return _mix(_mix(seed + _GOLDEN) ^ (number * _GOLDEN))


def uniform(
    stream: Int64[Tensor, "batch"], counter: Int64[Tensor, "batch"]
) -> Float64[Tensor, "batch"]:
    """Return a number in [0, 1) for each (stream, counter = token).

    SplitMix64's mixing function (Steele et al. 2014) on 64-bit integers.

    >>> import torch
    >>> one, two = torch.tensor([1]), torch.tensor([5, 1])
    >>> bool(uniform(stream(one, one), one) == uniform(stream(two, two), two)[1])
    True
    """
    state = _mix(stream + (counter + 1) * _GOLDEN)
    return _shift_right(state, 11).double() * 2.0**-53


def derive_seed(seed: int, *path: int) -> int:
    """Return a seed below 2^62 for a part of a run, by its numbers (of a step, of a row).

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    (True, False)
    """
    state = _mix(seed + _GOLDEN)
    for part in path:
        state = _mix(state ^ ((part + 1) * _GOLDEN & 0x7FFFFFFFFFFFFFFF)) + _GOLDEN
    return _shift_right(_mix(state), 2)

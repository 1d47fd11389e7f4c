"""Random numbers by counting: what a request draws depends on its own seed and position, never on
who else is in the batch.
"""

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (
        (1 << (64 - bits)) - 1
    )  # int64 shifts keep the sign; the mask makes the shift logical


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(
    seed: Int64[Tensor, "batch"], stream: Int64[Tensor, "batch"], counter: Int64[Tensor, "batch"]
) -> Float64[Tensor, "batch"]:
    """One number in [0, 1) for each (seed, stream, counter), by SplitMix64's mixing function
    (Steele et al. 2014) on 64-bit integers.

    Here the seed is a request's, the stream its sample, the counter the token's place in the
    response.

    >>> one = torch.tensor([1])
    >>> alone = uniform(one, one, one)
    >>> bool(alone == uniform(torch.tensor([5, 1]), torch.tensor([0, 1]), torch.tensor([9, 1]))[1])
    True
    """
    state = _mix(seed + _GOLDEN)
    state = _mix(state ^ (stream * _GOLDEN))
    state = _mix(state + (counter + 1) * _GOLDEN)
    return _shift_right(state, 11).double() * 2.0**-53


def derive_seed(seed: int, *path: int) -> int:
    """A seed for one part of a run (a step, a row), from the run's seed and the part's numbers;
    below 2^62.

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    (True, False)
    """
    state = _mix(torch.tensor([seed], dtype=torch.int64) + _GOLDEN)
    for part in path:
        state = _mix(state ^ ((part + 1) * _GOLDEN & 0x7FFFFFFFFFFFFFFF)) + _GOLDEN
    return int(_shift_right(_mix(state), 2))

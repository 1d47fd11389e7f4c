"""Ragged sequences as one padded tensor, and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.nn.utils.rnn import pad_sequence

from nemorl.checks import at_least


def pad(
    sequences: Sequence[Tensor],
    *,
    value: int | float | bool,
    length: int | None = None,
    multiple_of: int = 1,
) -> tuple[Shaped[Tensor, "batch seq *rest"], Int[Tensor, "batch"]]:
    """Return sequences as rows of one tensor, and their lengths; `unpad` is the inverse.

    The width is `length`, or the longest sequence, rounded up to `multiple_of`; free places, on the
    right, hold `value`. Raises: ValueError that names a sequence longer than `length`.

    >>> padded, lengths = pad([torch.tensor([1, 2, 3]), torch.tensor([4])], value=0, multiple_of=2)
    >>> padded.tolist(), lengths.tolist()
    ([[1, 2, 3, 0], [4, 0, 0, 0]], [3, 1])
    """
    at_least(1, multiple_of=multiple_of)
    sizes = [len(sequence) for sequence in sequences]
    longest = max(sizes)
    if length is not None and longest > length:
        raise ValueError(
            f"length must hold the longest sequence: sequence {sizes.index(longest)} has {longest}"
            f" tokens, length is {length}"
        )
    padded = pad_sequence(list(sequences), batch_first=True, padding_value=value)
    free = round_up(longest if length is None else length, multiple_of) - longest
    padded = pad_tensor(padded, (0, 0) * (padded.ndim - 2) + (0, free), value=value)
    return padded, torch.tensor(sizes, device=padded.device)


def unpad(padded: Shaped[Tensor, "batch seq *rest"], lengths: Int[Tensor, "batch"]) -> list[Tensor]:
    """Return the rows of a padded tensor without their padding.

    >>> rows = unpad(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    >>> [row.tolist() for row in rows]
    [[1, 2, 3], [4]]
    """
    return [row[:size] for row, size in zip(padded, lengths.tolist(), strict=True)]


def round_up(length: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `length`.

    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-length // multiple_of) * multiple_of

"""Ragged sequences as one padded tensor, and back."""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

Side = Literal["right", "left"]


def pad(
    sequences: Sequence[Sequence[int | float | bool] | Tensor],
    *,
    value: int | float | bool,
    length: int | None = None,
    multiple_of: int = 1,
    side: Side = "right",
) -> tuple[Shaped[Tensor, "batch seq *rest"], Int[Tensor, "batch"]]:
    """Return sequences as rows of one tensor, and their lengths; `unpad` is the inverse.

    The width is `length`, or the longest sequence, rounded up to `multiple_of`; free places hold
    `value`. Lists give int64, bool or float32; tensors keep their dtype.
    Raises: ValueError that names a sequence longer than `length`.

    >>> padded, lengths = pad([[1, 2, 3], [4]], value=0, multiple_of=2)
    >>> padded.tolist(), lengths.tolist()
    ([[1, 2, 3, 0], [4, 0, 0, 0]], [3, 1])
    """
    require_multiple(multiple_of)
    sizes = [len(sequence) for sequence in sequences]
    longest = max(sizes, default=0)
    if length is not None and longest > length:
        raise ValueError(
            f"length must hold the longest sequence: sequence {sizes.index(longest)} has {longest}"
            f" tokens, length is {length}"
        )
    width = round_up(longest if length is None else length, multiple_of)
    if any(isinstance(sequence, Tensor) for sequence in sequences):
        flat = torch.cat([torch.as_tensor(sequence) for sequence in sequences])
    elif longest:
        flat = torch.tensor(list(chain.from_iterable(sequences)))
    else:
        flat = torch.tensor([value])[:0]
    lengths = torch.tensor(sizes, dtype=torch.int64, device=flat.device)
    padded = flat.new_full((len(sizes), width, *flat.shape[1:]), value)
    padded[_real(lengths, width, side)] = flat
    return padded, lengths


def unpad(
    padded: Shaped[Tensor, "batch seq *rest"],
    lengths: Int[Tensor, "batch"] | Sequence[int],
    *,
    side: Side = "right",
) -> list[Tensor]:
    """Return the rows of a padded tensor without their padding.

    >>> [row.tolist() for row in unpad(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1])]
    [[1, 2, 3], [4]]
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=padded.device)
    width = padded.shape[1]
    sizes = lengths.tolist()
    wrong = [row for row, size in enumerate(sizes) if not 0 <= size <= width]
    if wrong or len(sizes) != len(padded):
        found = f"row {wrong[0]} has {sizes[wrong[0]]}" if wrong else f"got {len(sizes)} lengths"
        raise ValueError(
            f"lengths must hold one number from 0 to {width} for each of the {len(padded)} rows,"
            f" {found}"
        )
    return list(padded[_real(lengths, width, side)].split(sizes))


def round_up(length: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `length`.

    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-length // multiple_of) * multiple_of


def require_multiple(multiple_of: int) -> None:
    """Raise ValueError unless widths can be rounded up to `multiple_of`.

    >>> require_multiple(0)
    Traceback (most recent call last):
    ValueError: multiple_of must be at least 1 (1 = no rounding), got 0
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be at least 1 (1 = no rounding), got {multiple_of}")


def _real(lengths: Tensor, width: int, side: Side) -> Bool[Tensor, "batch seq"]:
    place = torch.arange(width, device=lengths.device)
    return place < lengths[:, None] if side == "right" else place >= width - lengths[:, None]

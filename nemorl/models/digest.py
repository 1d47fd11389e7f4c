"""Checksums and sampled numbers of tensors, by which holders of weights are compared."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from nemorl.data.batch import to_device

SIDE = 8
"""Rows and columns of each matrix in a receipt of weights, and the square of it of each vector."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STRIDE = 2654435761
"""Odd and large: the positions of consecutive versions are spread over the tensor."""


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits, an int64 on its device, which is the same on all kinds:
    `Σᵢ (2i + 1) Σⱼ words[i, j]` modulo 2^64, over rows of the last dimension.

    >>> checksum(torch.tensor([[1, 2], [3, 4]])), checksum(torch.tensor([[3, 4], [1, 2]]))
    (tensor(24), tensor(16))
    """
    size, width = tensor.element_size(), tensor.shape[-1] if tensor.ndim else 1
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # its words must be aligned
    words = flat.view(BITS[size if width * size % 8 else 8])
    rows = words.view(len(flat) // width if tensor.ndim > 1 else len(words), -1)
    sums = rows.sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def spread(size: int, count: int, shift: int = 0) -> list[int]:
    """Return up to `count` positions below `size`, evenly spaced.

    >>> spread(10, 3), spread(10, 3, shift=1), spread(2, 3)
    ([1, 5, 8], [2, 6, 9], [0, 1])
    """
    count = min(count, size)
    found = ((2 * i + 1) * size // (2 * count) + shift * STRIDE for i in range(count))
    return sorted({position % size for position in found})


def grid(shape: Sequence[int], version: int = 0, side: int = SIDE) -> tuple[list[int], list[int]]:
    """Return rows and columns to sample a tensor at, as a matrix whose columns are the last
    dimension's; a vector is one column.
    """
    if len(shape) < 2:
        return spread(prod(shape), side * side, version), [0]
    return spread(prod(shape[:-1]), side, version), spread(shape[-1], side, version)


def sampled(tensor: Tensor, version: int = 0, side: int = SIDE) -> Tensor:
    """Return the numbers of a tensor at its `grid`, `[rows * columns]`, on its device."""
    rows, columns = grid(tensor.shape, version, side)
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    # A copy of rows first: an index of both is far slower.
    at = to_device((torch.tensor(rows), torch.tensor(columns)), tensor.device)
    return matrix.index_select(0, at[0]).index_select(1, at[1]).flatten()


def sampled_box(
    box: Tensor, offsets: Sequence[int], shape: Sequence[int], side: int = SIDE
) -> tuple[Tensor, Tensor]:
    """Return what a box of a tensor has of its `sampled` numbers: their places among these, and the
    numbers, on its device.

    offsets: where the box begins in the tensor, whose shape is `shape`.
    """
    rows, columns = grid(shape, side=side)
    leading, first, width = tuple(shape), 0, 1
    if len(shape) > 1:
        leading, first, width = leading[:-1], offsets[-1], box.shape[-1]
    at, inside = torch.zeros(len(rows), dtype=torch.long), torch.ones(len(rows), dtype=torch.bool)
    coordinates = torch.unravel_index(torch.tensor(rows), leading)
    for place, begin, size in zip(coordinates, offsets, box.shape, strict=False):
        inside &= (place >= begin) & (place < begin + size)
        at = at * size + place - begin
    column = torch.tensor(columns) - first
    there = (column >= 0) & (column < width)
    places = torch.arange(len(rows) * len(columns)).view(len(rows), -1)[inside][:, there]
    chosen = to_device((at[inside], column[there]), box.device)
    matrix = box.detach().reshape(-1, width)
    return places.flatten(), matrix.index_select(0, chosen[0]).index_select(1, chosen[1]).flatten()


def differences(
    sent: Mapping[str, Tensor], found: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> str:
    """Return which tensors differ, in words; nothing if none does.

    NaN and infinity count as equal to each other, and as different from all other numbers.

    >>> differences({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 3.0])})
    "'a' has 3 where 1 was sent"
    """
    wrong = []
    for name, values in dict(found).items():
        expected, values = sent[name].float().cpu(), values.float().cpu()
        other = (values != expected) & (values.isfinite() | expected.isfinite())
        if other.any():
            at = int(other.nonzero()[0])
            wrong.append(f"{name!r} has {float(values[at]):g} where {float(expected[at]):g}")
    shown = [f"{one} was sent" for one in wrong[:5]]
    return ", ".join(shown) + f" and {len(wrong) - 5} more" * (len(wrong) > 5)


class WeightsDiffer(RuntimeError):
    """An engine that took an update holds other weights than it was sent."""


def check_held(holder: str, sent: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    if wrong := differences(sent, found):
        raise WeightsDiffer(f"{holder} must hold the weights that came, but it does not: {wrong}")


def misfits(wrong: Sequence[str]) -> ValueError:
    """Return the error of weights that do not fit a generator's model."""
    return ValueError(
        f"weights must fit the generator's model, but {', '.join(wrong)}: use the same"
        " model on both sides"
    )

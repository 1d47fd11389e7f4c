"""What a rank of megatron-core writes into a checkpoint: the boxes of Hugging Face's tensors that
its spans of parameters consist of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Pieces, shared_out

if TYPE_CHECKING:
    from nemorl.parallel.megatron.optimizer import ShardedAdamW
    from nemorl.parallel.megatron.weights import Conversion, Entry


@dataclass(frozen=True)
class SpanBox:
    """A box of a Hugging Face tensor, and where a rank's span of a parameter has its values."""

    piece: Piece
    parameter: nn.Parameter
    part: slice
    rows: Tensor

    def of(self, span: Tensor) -> Tensor:
        rows = span[self.part].view(-1, prod(self.piece.shape[1:]))
        return rows[self.rows.to(rows.device)].view(self.piece.shape)


def own_boxes(stages: Any, optimizer: ShardedAdamW, conversion: Conversion) -> list[SpanBox]:
    """Return the boxes that this rank writes. A box that several ranks have is written by one of
    them.
    """
    parameters = dict(stages.named_parameters())
    entries = {name: conversion.here[name] for name in parameters}
    world = conversion.world
    same = {
        name: parameters[name].numel()
        for name, entry in entries.items()
        if entry.divided and entry.dim is None
    }
    owners = shared_out(same, world.plan.tp)
    boxes: list[SpanBox] = []
    for name, parameter in parameters.items():
        span, entry = optimizer.span(parameter), entries[name]
        ours = owners.get(name, world.tp_rank) == world.tp_rank
        if span is not None and ours and not conversion.is_copy(name):
            boxes += _boxes(parameter, entry, conversion, span)
    return boxes


def own_weights(boxes: list[SpanBox], optimizer: ShardedAdamW) -> Pieces:
    """Return the weights' pieces, and their values in float32."""
    values = (box.of(optimizer.main(box.parameter)) for box in boxes)
    return [box.piece for box in boxes], values


def _boxes(
    parameter: nn.Parameter, entry: Entry, conversion: Conversion, span: slice
) -> Iterator[SpanBox]:
    starts, addresses, column = _addresses(entry, conversion)
    width = prod(parameter.shape[1:])
    for begin, end in _by_rows(span.start, span.stop, width):
        row, left = divmod(begin, width)
        found = addresses[row : row + max((end - begin) // width, 1)]
        order = found.argsort()
        cuts = (found[order].diff() != 1).nonzero().flatten() + 1
        for rows in order.tensor_split(cuts):
            first = int(found[rows[0]])
            name = max((name for name in starts if starts[name] <= first), key=starts.__getitem__)
            shape: tuple[int, ...] = (len(rows),)
            offsets: tuple[int, ...] = (first - starts[name],)
            if parameter.ndim > 1:
                shape, offsets = (*shape, min(end - begin, width)), (*offsets, column + left)
            piece = Piece(name, torch.float32, shape, offsets)
            yield SpanBox(piece, parameter, slice(begin - span.start, end - span.start), rows)


def _addresses(entry: Entry, conversion: Conversion) -> tuple[dict[str, int], Tensor, int]:
    sizes = [conversion.shapes[name][0] + 1 for name in entry.names]
    starts = dict(zip(entry.names, accumulate(sizes, initial=0), strict=False))
    columns = set()

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        columns.add((*offsets, 0)[1])
        return torch.arange(shape[0]) + starts[name] + offsets[0]

    addresses = conversion.own(entry, read)
    (column,) = columns
    return starts, addresses, column


def _by_rows(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the part of a row, whole rows, and the part of a row that make up a span.

    >>> list(_by_rows(2, 12, 5)), list(_by_rows(6, 9, 5)), list(_by_rows(5, 10, 5))
    ([(2, 5), (5, 10), (10, 12)], [(6, 9)], [(5, 10)])
    """
    whole = min(end, -(-begin // width) * width), max(begin, end // width * width)
    return pairwise(sorted({begin, *whole, end}))


MOMENTS = ("exp_avg", "exp_avg_sq")


def own_moments(boxes: list[SpanBox], optimizer: ShardedAdamW, step: int) -> Pieces:
    """Return the pieces of AdamW's state that this rank writes, under Hugging Face names."""
    if not step:
        return [], ()
    pieces = [
        replace(box.piece, name=f"{box.piece.name}.{what}") for what in MOMENTS for box in boxes
    ]
    # Each tensor has one box that begins at its first number.
    begun = [box.piece.name for box in boxes if not any(box.piece.offsets)]
    pieces += [Piece(f"{name}.step", torch.float32, (), ()) for name in begun]
    values = (box.of(optimizer.state(box.parameter)[what]) for what in MOMENTS for box in boxes)
    return pieces, chain(values, [torch.tensor(float(step))] * len(begun))


def fill_moments(
    stages: Any,
    optimizer: ShardedAdamW,
    conversion: Conversion,
    stored: TensorFiles,
    device: torch.device,
) -> None:
    """Copy this rank's spans out of stored moments."""
    saved = bool(stored.shapes)
    for name, parameter in stages.named_parameters():
        if (span := optimizer.span(parameter)) is None:
            continue
        state, entry = optimizer.state(parameter), conversion.here[name]
        state.clear()
        for what in MOMENTS if saved else ():
            value = conversion.own(entry, partial(_read, stored, what))
            state[what] = value.flatten()[span].to(device, copy=True)
        if saved:
            state["step"] = stored.read(f"{entry.names[0]}.step").to(device, copy=True)


def _read(stored: TensorFiles, what: str, name: str, *box: tuple[int, ...]) -> Tensor:
    return stored.read(f"{name}.{what}", *box)

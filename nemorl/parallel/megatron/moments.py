"""AdamW's state of a rank of megatron-core, into a checkpoint and back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Pieces

if TYPE_CHECKING:
    from nemorl.parallel.megatron.optimizer import ShardedAdamW
    from nemorl.parallel.megatron.pieces import SpanBox
    from nemorl.parallel.megatron.weights import Conversion

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, besides its number of steps."""


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

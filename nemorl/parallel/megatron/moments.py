"""AdamW's state of a rank of megatron-core, as whole tensors in a checkpoint and back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import owned, shared_out
from nemorl.parallel.world import World

if TYPE_CHECKING:
    from nemorl.parallel.megatron.optimizer import ShardedAdamW
    from nemorl.parallel.megatron.weights import Conversion

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, besides its number of steps."""


def moments(
    stages: Any, optimizer: ShardedAdamW, conversion: Conversion, world: World, *, step: int
) -> tuple[list[Piece], Iterable[Tensor]]:
    """Return this rank's share of AdamW's state, whole tensors under Hugging Face names."""
    if not step:
        return [], ()

    def moment(what: str, name: str) -> Tensor:
        parameter = stages.get_parameter(name)
        return optimizer.gathered(parameter, optimizer.state(parameter).get(what))

    shapes = conversion.shapes
    owners = shared_out({name: prod(shape) for name, shape in shapes.items()}, world.size)
    own = [name for name in conversion.order() if owners[name] == world.rank]
    pieces = [
        Piece(f"{name}.{what}", torch.float32, shapes[name], (0,) * len(shapes[name]))
        for what in MOMENTS
        for name in own
    ]
    pieces += [Piece(f"{name}.step", torch.float32, (), ()) for name in own]
    whole = (conversion.whole(partial(moment, what)) for what in MOMENTS)
    steps = [torch.tensor(float(step))] * len(own)
    return pieces, chain(*(owned(each, own) for each in whole), steps)


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

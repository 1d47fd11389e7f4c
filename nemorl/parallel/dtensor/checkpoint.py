"""What checkpoints of DTensors hold, and how a model and its optimizer are filled from them."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.models.adapters import full_tensor, has_adapters, live_tensors
from nemorl.models.stored import as_stored, shapes_of, stored_names
from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Contents, Saved, write_model_config
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.optimizers import AdamW8bit, Optimizers
from nemorl.parallel.dtensor.pieces import fill, own_part, replicas
from nemorl.parallel.world import World


def load(saved: Saved, model: nn.Module, optimizer: Optimizers) -> None:
    """Copy this rank's part into the model's own tensors, or its adapters, and its optimizer.

    Raises ValueError, before anything is changed, if it belongs to another model. After a
    DamagedFile another checkpoint must be loaded.
    """
    with saved.world.share_errors():
        _load_weights(saved, model)
        _load_optimizer(saved, optimizer, model)


def _load_weights(saved: Saved, model: nn.Module) -> None:
    lora = has_adapters(model)
    own = adapter_tensors(model) if lora else live_tensors(model)
    names = {} if lora else stored_names(model)
    stored = saved.weights(shapes_of(own, names), lora=lora)
    if lora:
        check_scale(model, saved.path)
    for name, tensor in own.items():
        fill(tensor, stored, name, names)


def _load_optimizer(saved: Saved, optimizer: Optimizers, model: nn.Module) -> None:
    names = {id(parameter): name for name, parameter in live_tensors(model).items()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    stored = saved.optimizer(names[id(parameter)] for parameter in parameters)
    for part in optimizer.parts:
        own = [each for group in part.param_groups for each in group["params"]]
        if isinstance(part, AdamW8bit):
            _load_8bit(part, {each: names[id(each)] for each in own}, stored)
        else:
            _load_part(part, {names[id(each)]: each for each in own}, stored)


def _load_part(
    part: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], stored: TensorFiles
) -> None:
    indices = {name: index for index, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, shape in stored.shapes.items():
        name, _, what = key.rpartition(".")
        if name not in parameters:
            continue
        parameter = parameters[name]
        if shape == tuple(parameter.shape):
            value = fill(torch.empty_like(parameter, requires_grad=False), stored, key)
        else:
            value = stored.read(key).clone()
        state.setdefault(indices[name], {})[what] = value
    part.load_state_dict({**part.state_dict(), "state": state})


def _load_8bit(part: AdamW8bit, names: Mapping[nn.Parameter, str], stored: TensorFiles) -> None:
    state = part.fresh_state() if stored.shapes else {}
    for parameter, values in state.items():
        for what, value in values.items():
            fill(value, stored, f"{names[parameter]}.{what}")
    part.keep(state)


def contents_of(model: nn.Module, optimizer: Optimizers, world: World) -> Contents:
    """Return a checkpoint's contents of a model, or its adapters, and their optimizer."""
    lora = has_adapters(model)
    tensors = adapter_tensors(model) if lora else live_tensors(model)
    names = {} if lora else stored_names(model)
    outlines = [
        (name, torch.empty(x.shape, dtype=x.dtype, device="meta")) for name, x in tensors.items()
    ]
    return Contents(
        weights=dict(as_stored(outlines, names)),
        gather=lambda: as_stored(_whole(tensors), names),
        optimizer=_pieces(model, optimizer, world),
        write_config=partial(write_adapter_config if lora else write_model_config, model),
        adapters=lora,
    )


def _whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield name, full_tensor(tensor.detach())


def _pieces(
    model: nn.Module, optimizer: Optimizers, world: World
) -> tuple[list[Piece], list[Tensor]]:
    """Return this rank's pieces of the optimizer's state. Ranks with the same take turns.

    In the order of its parameters: its own table has another one after a load.
    """
    names = {id(parameter): name for name, parameter in live_tensors(model).items()}
    pieces: list[Piece] = []
    values: list[Tensor] = []
    entries = [
        (f"{names[id(parameter)]}.{what}", tensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for what, tensor in sorted(optimizer.state.get(parameter, {}).items())
    ]
    for number, (name, tensor) in enumerate(entries):
        local, offsets = own_part(tensor)
        copies, this = world.size, world.rank
        if isinstance(tensor, DTensor):
            copies, this = replicas(tensor)
        if local.numel() and this == number % copies:
            pieces.append(Piece(name, local.dtype, tuple(local.shape), offsets))
            values.append(local)
    return pieces, values

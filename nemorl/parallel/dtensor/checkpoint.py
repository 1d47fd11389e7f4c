"""What checkpoints of DTensors hold, and how a model and its optimizer are filled from them."""

from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from nemorl.models.adapters import full_tensor, has_adapters, live_tensors
from nemorl.models.stored import (
    Stored,
    names_in_files,
    of_parameters,
    shapes_of,
    stored_names,
)
from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Contents, Saved, write_model_config
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.optimizers import AdamW8bit, Optimizers
from nemorl.parallel.dtensor.pieces import fill, own_pieces
from nemorl.parallel.world import World


def load(saved: Saved, model: nn.Module, optimizer: Optimizers) -> None:
    """Copy this rank's part into the model's own tensors, or its adapters, and its optimizer.

    Raises ValueError, before anything is changed, if it belongs to another model or optimizer.
    After a DamagedFile another checkpoint must be loaded.
    """
    lora, names = has_adapters(model), _names(model)
    own = adapter_tensors(model) if lora else live_tensors(model)
    weights = saved.weights(shapes_of(own, names), lora=lora)
    trained = _trained(model, optimizer)
    state = saved.optimizer(chain(*(names_in_files(name, names) for name in trained)))
    if lora:
        check_scale(model, saved.path)
    for name, tensor in own.items():
        fill(tensor, weights, name, names)
    _load_optimizer(optimizer, {each: name for name, each in trained.items()}, state, names)


def _names(model: nn.Module) -> Stored:
    return {} if has_adapters(model) else stored_names(model)


def _trained(model: nn.Module, optimizer: Optimizers) -> dict[str, nn.Parameter]:
    names = {id(parameter): name for name, parameter in live_tensors(model).items()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: parameter for group in groups for parameter in group["params"]}


def _load_optimizer(
    optimizer: Optimizers, names: Mapping[nn.Parameter, str], files: TensorFiles, stored: Stored
) -> None:
    for part in optimizer.parts:
        own = (parameter for group in part.param_groups for parameter in group["params"])
        if isinstance(part, AdamW8bit):
            _load_8bit(part, names, files, stored)
        else:
            _load_part(part, {names[parameter]: parameter for parameter in own}, files, stored)


def _load_part(
    part: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    files: TensorFiles,
    stored: Stored,
) -> None:
    shapes, kept = files.shapes, dict[str, list[str]]()
    for key in shapes:
        name, _, what = key.rpartition(".")
        kept.setdefault(name, []).append(what)
    state: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        first, *_ = names_in_files(name, stored)
        for what in kept.get(first, ()):
            is_number = parameter.ndim and not shapes[f"{first}.{what}"]
            value = torch.empty(()) if is_number else torch.empty_like(parameter)
            key = f"{name}.{what}"
            value = fill(value, files, key, of_parameters([key], stored))
            state.setdefault(index, {})[what] = value
    part.load_state_dict({**part.state_dict(), "state": state})


def _load_8bit(
    part: AdamW8bit, names: Mapping[nn.Parameter, str], files: TensorFiles, stored: Stored
) -> None:
    state = part.fresh_state() if files.shapes else {}
    for parameter, values in state.items():
        for what, value in values.items():
            key = f"{names[parameter]}.{what}"
            fill(value, files, key, of_parameters([key], stored))
    part.keep(state)


def contents_of(model: nn.Module, optimizer: Optimizers, world: World) -> Contents:
    """Return a checkpoint's contents of a model, or its adapters, and their optimizer; of adapters
    a collective call.
    """
    lora, names = has_adapters(model), _names(model)
    state = _state(model, optimizer)
    return Contents(
        weights=_adapters(model, world) if lora else own_pieces(live_tensors(model), world, names),
        optimizer=own_pieces(state, world, of_parameters(state, names)),
        write_config=partial(write_adapter_config if lora else write_model_config, model),
        adapters=lora,
    )


def _adapters(model: nn.Module, world: World) -> tuple[list[Piece], list[Tensor]]:
    """Return PEFT's matrices, which rank 0 writes whole; a collective call."""
    pieces: list[Piece] = []
    values: list[Tensor] = []
    for name, tensor in adapter_tensors(model).items():
        whole = full_tensor(tensor.detach())
        if world.rank == 0:
            pieces.append(Piece.whole(name, whole))
            values.append(whole)
    return pieces, values


def _state(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    return {
        f"{name}.{what}": tensor
        for name, parameter in _trained(model, optimizer).items()
        for what, tensor in sorted(optimizer.state.get(parameter, {}).items())
    }

"""What checkpoints of DTensors hold, and how a model and its optimizer are filled from them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from nemorl.models.adapters import full_tensor, has_adapters, live_tensors
from nemorl.models.stored import shapes_of, stored_names
from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import Contents, Saved, write_model_config
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.optimizers import AdamW8bit, Optimizers
from nemorl.parallel.dtensor.pieces import fill, own_pieces
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
    """Return a checkpoint's contents of a model, or its adapters, and their optimizer; of adapters
    a collective call.
    """
    lora = has_adapters(model)
    return Contents(
        weights=_adapters(model, world)
        if lora
        else own_pieces(live_tensors(model), world, stored_names(model)),
        optimizer=own_pieces(_state(model, optimizer), world),
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
    """Return the optimizer's state by `<parameter's name>.<what>`, in the order of its parameters:
    its own table has another one after a load.
    """
    names = {id(parameter): name for name, parameter in live_tensors(model).items()}
    return {
        f"{names[id(parameter)]}.{what}": tensor
        for group in optimizer.param_groups
        for parameter in group["params"]
        for what, tensor in sorted(optimizer.state.get(parameter, {}).items())
    }

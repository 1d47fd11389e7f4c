"""A rank's own piece of a tensor that ranks share, and checkpoints of such pieces."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nemorl.models.adapters import full_tensor, has_adapters, live_tensors
from nemorl.models.tensor_files import (
    Groups,
    Piece,
    Stored,
    TensorFiles,
    as_live,
    names_in_files,
    of_experts,
    of_parameters,
    shapes_of,
    stored_names,
)
from nemorl.parallel.checkpoint import Contents, Saved, shared_out, write_model_config
from nemorl.parallel.dtensor.lora import adapter_tensors, check_scale, write_adapter_config
from nemorl.parallel.dtensor.optimizers import AdamW8bit, Optimizers
from nemorl.parallel.world import World


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and where it begins in the whole."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape)
    return local, tuple(offsets)


def replicas(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks have the same part of a tensor, and this rank's index among them."""
    count, this = 1, 0
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(axis)
            count, this = count * size, this * size + tensor.device_mesh.get_local_rank(axis)
    return count, this


def own_pieces(
    tensors: Mapping[str, Tensor], world: World, stored: Stored
) -> tuple[list[Piece], list[Tensor]]:
    """Return the pieces of tensors that this rank writes, and their values."""
    pieces: list[Piece] = []
    values: list[Tensor] = []
    ours = _ours(tensors, world)
    for name, tensor in tensors.items():
        for file, box, offsets in boxes_in_files(name, tensor, stored) if name in ours else ():
            if box.numel():
                pieces.append(Piece(file, box.dtype, tuple(box.shape), offsets))
                values.append(box)
    return pieces, values


def boxes_in_files(
    name: str, tensor: Tensor, stored: Stored
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yield this rank's part of a tensor as files have it: names, boxes, and where these begin.
    Each expert has its own copy of a number, such as an optimizer's steps.
    """
    local, offsets = own_part(tensor)
    groups = stored.get(name, ((name,),))
    if _is_one(groups, local):
        for file in chain(*groups):
            yield file, local, offsets
        return
    assert local.shape[1:] == tensor.shape[1:]  # FSDP2 cuts the first dimension
    for expert, matrix in of_experts(groups, local, offsets[0]):
        yield expert, matrix, (0,) * matrix.ndim


def _is_one(groups: Groups, tensor: Tensor) -> bool:
    return not tensor.ndim or groups == ((groups[0][0],),)


def _ours(tensors: Mapping[str, Tensor], world: World) -> set[str]:
    shared: dict[tuple[Any, ...], dict[str, int]] = {}
    found = set[str]()
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            replicated = tuple(isinstance(each, Replicate) for each in tensor.placements)
            alike = (*replicas(tensor), tensor.device_mesh, replicated)
            shared.setdefault(alike, {})[name] = tensor.numel()
        elif world.rank == 0:
            found.add(name)
    for (count, this, *_), sizes in shared.items():
        owners = shared_out(sizes, count)
        found |= {name for name, owner in owners.items() if owner == this}
    return found


def fill(tensor: Tensor, files: TensorFiles, name: str, stored: Stored) -> Tensor:
    """Copy this rank's part of a stored tensor into its own, and return that."""
    groups = stored.get(name, ((name,),))
    with torch.no_grad():
        local, offsets = own_part(tensor)
        if local.numel() and _is_one(groups, local):
            local.copy_(files.read(groups[0][0], offsets, local.shape))
        elif local.numel():
            assert local.shape[1:] == tensor.shape[1:]  # FSDP2 cuts the first dimension
            local.copy_(as_live(groups, files.read, first=offsets[0], count=len(local)))
    return tensor


@contextmanager
def gathering(model: nn.Module) -> Iterator[None]:
    """Free what FSDP2 gathered in the block: without a backward pass the head would stay."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def load(saved: Saved, model: nn.Module, optimizer: Optimizers) -> None:
    """Copy this rank's part into the model's own tensors, or its adapters, and its optimizer.

    Raises: ValueError, with nothing changed, for another model's or optimizer's checkpoint. After a
    DamagedFile another must be loaded.
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
    by_parameter = {parameter: name for name, parameter in trained.items()}
    for part in optimizer.parts:
        if isinstance(part, AdamW8bit):
            fresh = part.fresh_state() if state.shapes else {}
            for parameter, values in fresh.items():
                for what, value in values.items():
                    key = f"{by_parameter[parameter]}.{what}"
                    fill(value, state, key, of_parameters([key], names))
            part.keep(fresh)
        else:
            its = {
                by_parameter[each]: each for group in part.param_groups for each in group["params"]
            }
            _load_part(part, its, state, names)


def _names(model: nn.Module) -> Stored:
    return {} if has_adapters(model) else stored_names(model)


def _trained(model: nn.Module, optimizer: Optimizers) -> dict[str, nn.Parameter]:
    names = {id(parameter): name for name, parameter in live_tensors(model).items()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: parameter for group in groups for parameter in group["params"]}


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


def contents_of(model: nn.Module, optimizer: Optimizers, world: World) -> Contents:
    """Return a checkpoint's contents of a model, or its adapters (a collective call), and their
    optimizer.
    """
    lora, names = has_adapters(model), _names(model)
    weights = live_tensors(model)
    state = {
        f"{name}.{what}": tensor
        for name, parameter in _trained(model, optimizer).items()
        for what, tensor in sorted(optimizer.state.get(parameter, {}).items())
    }
    if lora:  # whole matrices, which rank 0 writes and others need not hold
        wholes = ((name, full_tensor(x.detach())) for name, x in adapter_tensors(model).items())
        weights = {name: whole for name, whole in wholes if world.rank == 0}
    return Contents(
        weights=own_pieces(weights, world, names),
        optimizer=own_pieces(state, world, of_parameters(state, names)),
        write_config=partial(write_adapter_config if lora else write_model_config, model),
        adapters=lora,
    )

"""A rank's own piece of a tensor that ranks share."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nemorl.models.stored import Groups, Stored, as_live, of_experts
from nemorl.models.tensor_files import Piece, TensorFiles
from nemorl.parallel.checkpoint import shared_out
from nemorl.parallel.world import World

NOTHING: Stored = {}


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
    tensors: Mapping[str, Tensor], world: World, stored: Stored = NOTHING
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
    name: str, tensor: Tensor, stored: Stored = NOTHING
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yield this rank's part of a tensor as files have it: names, boxes, and where these begin. A
    number, such as an optimizer's steps, is there for each expert.
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
    """Return the tensors of whose part this rank, of all that hold it, is the one that writes."""
    sizes: dict[Hashable, dict[str, int]] = {}
    places: dict[Hashable, tuple[int, int]] = {}
    found = set[str]()
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            replicated = tuple(isinstance(each, Replicate) for each in tensor.placements)
            where: Hashable = tensor.device_mesh, replicated
            sizes.setdefault(where, {})[name] = tensor.numel()
            places[where] = replicas(tensor)
        elif world.rank == 0:
            found.add(name)
    for where, (count, this) in places.items():
        owners = shared_out(sizes[where], count)
        found |= {name for name, owner in owners.items() if owner == this}
    return found


def fill(tensor: Tensor, files: TensorFiles, name: str, stored: Stored = NOTHING) -> Tensor:
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
    """Free, after forward passes, what FSDP2 gathered: without a backward pass the head would
    stay.
    """
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

"""A hash of a model's weights, by which a checkpoint knows the weights that its run began with."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.models.tensor_files import grid, sampled_box, shapes_of, stored_names
from nemorl.parallel.dtensor.pieces import boxes_in_files, replicas
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import World

ALONE = World(plan=ParallelPlan(), device=torch.device("cpu"))
SIDE = 32
Box = tuple[str, Tensor, tuple[int, ...]]
Samples = dict[str, tuple[tuple[int, ...], bytes]]
"""What a fingerprint reads of each tensor: its shape, and some numbers in float32."""


def fingerprint(model: nn.Module, world: World = ALONE) -> str:
    """Return a hash of the weights without adapters: names and shapes that files have, and evenly
    spaced samples; with a `world` of ranks a collective call.
    """
    tensors = {
        _plain(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    stored = {
        _plain(name): tuple(tuple(map(_plain, names)) for names in groups)
        for name, groups in stored_names(model).items()
    }
    boxes = (
        box
        for name, tensor in tensors.items()
        if (replicas(tensor)[1] if isinstance(tensor, DTensor) else world.rank) == 0
        for box in boxes_in_files(name, tensor, stored)
    )
    return hash_of(samples_of(shapes_of(tensors, stored), boxes, world))


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def hash_of(samples: Samples) -> str:
    """Return the fingerprint of a model from its tensors' samples, in state_dict's order."""
    digest = hashlib.sha256()
    for name, (shape, sample) in samples.items():
        digest.update(f"{name} {shape}".encode())
        digest.update(sample)
    return digest.hexdigest()


def samples_of(
    shapes: Mapping[str, tuple[int, ...]], boxes: Iterable[Box], world: World
) -> Samples:
    """Return the samples of tensors that the `boxes` of all ranks make up; a collective call."""
    grids = (grid(shape, side=SIDE) for shape in shapes.values())
    ends = list(accumulate((len(rows) * len(columns) for rows, columns in grids), initial=0))
    spans = {name: slice(*span) for name, span in zip(shapes, pairwise(ends), strict=True)}
    found = torch.zeros(ends[-1])
    with world.share_errors():
        for name, box, offsets in boxes:
            if box.numel():
                places, numbers = sampled_box(box, offsets, shapes[name], SIDE)
                found[spans[name]][places] = numbers.to("cpu", torch.float32)
    if world.control_group is not None:
        # As integers: a sum of floats would lose the sign of zero.
        dist.all_reduce(found.view(torch.int32), group=world.control_group)
    return {name: (shapes[name], found[span].numpy().tobytes()) for name, span in spans.items()}

"""A hash of a model's weights, by which a checkpoint knows the weights that its run began with."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.models.digest import grid, sampled_box
from nemorl.parallel.dtensor.pieces import own_part, replicas

SIDE = 32
"""Rows and columns of each matrix that a fingerprint reads."""
Box = tuple[str, Tensor, tuple[int, ...]]
"""A tensor's name, a box of it, and where that begins."""
Samples = dict[str, tuple[tuple[int, ...], bytes]]
"""What a fingerprint reads of each tensor: its shape, and some numbers in float32."""


def fingerprint(model: nn.Module, group: dist.ProcessGroup | None = None) -> str:
    """Return a hash of the weights without adapters: names, shapes, and evenly spaced samples.

    group: of the ranks that share the model, which has the same fingerprint; then a collective
        call. Each reads its own parts.
    """
    tensors = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    first = group is None or group.rank() == 0
    boxes = (
        (name, *own_part(tensor))
        for name, tensor in tensors.items()
        if (replicas(tensor)[1] == 0 if isinstance(tensor, DTensor) else first)
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return hash_of(samples_of(shapes, boxes, group))


def hash_of(samples: Samples) -> str:
    """Return the fingerprint of a model from the samples of its state_dict's tensors, in order."""
    digest = hashlib.sha256()
    for name, (shape, sample) in samples.items():
        digest.update(f"{name} {shape}".encode())
        digest.update(sample)
    return digest.hexdigest()


def samples_of(
    shapes: Mapping[str, tuple[int, ...]],
    boxes: Iterable[Box],
    group: dist.ProcessGroup | None = None,
) -> Samples:
    """Return the samples of tensors with these shapes.

    boxes: what makes up the tensors; with a group, that of all its ranks together, and no number
        twice. Then a collective call, for the samples alone.
    """
    grids = (grid(shape, side=SIDE) for shape in shapes.values())
    ends = list(accumulate((len(rows) * len(columns) for rows, columns in grids), initial=0))
    spans = {name: slice(*span) for name, span in zip(shapes, pairwise(ends), strict=True)}
    found = torch.zeros(ends[-1])
    for name, box, offsets in boxes:
        if box.numel():
            places, numbers = sampled_box(box, offsets, shapes[name], SIDE)
            found[spans[name]][places] = numbers.to("cpu", torch.float32)
    if group is not None:
        # As integers: a sum of floats would lose the sign of zero.
        dist.all_reduce(found.view(torch.int32), group=group)
    return {name: (shapes[name], found[span].numpy().tobytes()) for name, span in spans.items()}


def check_base(expected: str, found: str, folder: Path) -> None:
    """Raise ValueError if the run of a checkpoint began with weights of another fingerprint."""
    if found != expected:
        raise ValueError(
            f"checkpoint {folder} must be of a run that began with the model in use, but it began"
            " with other weights: load the initial model of that run again"
        )

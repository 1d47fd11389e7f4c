"""A hash of a model's weights, by which a checkpoint knows the weights that its run began with."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nemorl.models.adapters import full_tensor
from nemorl.models.digest import sampled

SIDE = 32
"""Rows and columns of each matrix that a fingerprint reads."""


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the weights without adapters: names, shapes, and evenly spaced samples.

    A sharded model has the same one; its tensors are gathered one by one: a collective call.
    """
    return hash_of(
        {
            name.replace(".base_layer.", "."): sample_of(full_tensor(tensor))
            for name, tensor in model.state_dict().items()
            if ".lora_" not in name
        }
    )


def hash_of(samples: Mapping[str, tuple[tuple[int, ...], bytes]]) -> str:
    """Return the fingerprint of a model from `sample_of` its state_dict's tensors, in order."""
    digest = hashlib.sha256()
    for name, (shape, sample) in samples.items():
        digest.update(f"{name} {shape}".encode())
        digest.update(sample)
    return digest.hexdigest()


def sample_of(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    """Return what a fingerprint reads of a tensor: its shape, and some numbers as bytes."""
    # A copy: memory that numpy has seen can't be offloaded any more.
    sample = sampled(tensor, side=SIDE).to("cpu", torch.float32, copy=True)
    return tuple(tensor.shape), sample.numpy().tobytes()


def check_base(expected: str, found: str, folder: Path) -> None:
    """Raise ValueError if the run of a checkpoint began with weights of another fingerprint."""
    if found != expected:
        raise ValueError(
            f"checkpoint {folder} must be of a run that began with the model in use, but it began"
            " with other weights: load the initial model of that run again"
        )

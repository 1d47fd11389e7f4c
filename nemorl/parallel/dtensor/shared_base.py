"""One base under the adapters of several backends of a process: their frozen weights are equal, and
lie in memory once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nemorl.models.adapters import live_tensors
from nemorl.parallel.offload import local_part, storage_of

_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Backends of this process with adapters over weights that were loaded for them."""


@torch.no_grad()
def share_base(backend: Any) -> None:
    """Put frozen weights of another live backend in the place of a new one's, where all of this
    rank's parts are equal.
    """
    own = _frozen(backend)
    for other in _LIVE:
        theirs = _frozen(other)
        if own.keys() == theirs.keys() and all(_equal(own[name], theirs[name]) for name in own):
            for name, parameter in own.items():
                if hasattr(parameter, "_local_tensor"):  # FSDP2 looks there when it begins
                    parameter._local_tensor = theirs[name]._local_tensor
                else:
                    parameter.data = theirs[name].data
            break
    _LIVE.add(backend)


def leave_base(backend: Any) -> bool:
    """Return whether other live backends have weights of a backend, which is no longer one."""
    others = others_weights(backend)
    shared = any(storage_of(each) in others for each in _frozen(backend).values())
    _LIVE.discard(backend)
    return shared


def others_weights(backend: Any) -> set[int]:
    """Return the addresses of the storages of other live backends' frozen weights."""
    others = (other for other in _LIVE if other is not backend)
    return {storage_of(each) for other in others for each in _frozen(other).values()}


def _frozen(backend: Any) -> dict[str, Any]:
    return dict(_frozen_of(backend._loaded()))


def _frozen_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in live_tensors(model).items():
        if isinstance(tensor, nn.Parameter) and ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def _equal(one: Any, other: Any) -> bool:
    same = getattr(one, "placements", None) == getattr(other, "placements", None)
    mesh = getattr(one, "device_mesh", None) == getattr(other, "device_mesh", None)
    a, b = local_part(one), local_part(other)
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return same and mesh and alike and torch.equal(a, b)

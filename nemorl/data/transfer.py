"""Copies to a device that the host does not wait for."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nemorl.accelerator import is_accelerator


def to_device(values: Any, device: torch.device) -> Any:
    """Return a pytree with its tensors on a device, through pinned memory.

    >>> to_device([torch.ones(1), "x"], torch.device("cpu"))
    [tensor([1.]), 'x']
    """

    return pytree.tree_map_only(Tensor, lambda tensor: _moved(tensor, device), values)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if is_accelerator(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # torch keeps it until the copy is done
    return tensor.to(device, non_blocking=True)

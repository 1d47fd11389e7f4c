"""Questions about devices that are answered by what a device is, not by its maker's name."""

from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory of its own, and the host may run ahead of it.

    >>> [is_accelerator(torch.device(name)) for name in ("cuda", "cpu", "mps")]
    [True, False, False]
    """
    return device.type not in ("cpu", "meta", "mps")


def module_of(device: torch.device) -> Any:
    """Return torch's module for an accelerator's kind, such as `torch.cuda`."""
    return torch.get_device_module(device)

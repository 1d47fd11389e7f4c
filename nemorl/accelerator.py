"""Questions about devices that are answered by what a device is, not by its maker's name."""

from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host may run ahead of a device, which has memory of its own: CUDA's and
    ROCm's GPUs, and the emulated one of the tests.

    >>> is_accelerator(torch.device("cuda")), is_accelerator(torch.device("cpu"))
    (True, False)
    """
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """Return torch's module for an accelerator's kind, such as `torch.cuda`, with `synchronize`,
    `empty_cache` and the counters of memory.
    """
    return torch.get_device_module(device)

"""A question about devices that is answered by what a device is, not by its maker's name."""

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory of its own, and the host may run ahead of it.

    >>> [is_accelerator(torch.device(name)) for name in ("cuda", "cpu", "mps")]
    [True, False, False]
    """
    return device.type not in ("cpu", "meta", "mps")

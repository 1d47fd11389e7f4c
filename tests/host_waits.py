"""Where the host waits for a device, found without one.

Numbers that are read raise an error where the device is meta; `HostWaits` counts them on a CPU, and
the numbers of the host that are copied while it waits.
"""

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


class HostWaits(TorchFunctionMode):
    """Counts in its block what a GPU's host would wait for, by the function's name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        device = (kwargs or {}).get("device")
        copies = func in (torch.tensor, torch.as_tensor) and device is not None
        if name in READS or copies:
            self.found[f"{name} {device}" if copies else name] += 1
        return func(*args, **(kwargs or {}))

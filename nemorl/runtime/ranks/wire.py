"""What is sent to ranks and back, as bytes:

Python objects, closures too, with tensors as plain numbers in main memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor


def dumps(value: Any) -> bytes:
    """Functions that the other side can't import (lambdas, closures, those of a script) travel
    whole; tensors of any device arrive on the CPU.

    >>> loads(dumps({"x": torch.ones(2, dtype=torch.bfloat16), "f": lambda x: x + 1}))["f"](1)
    2
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given.

    Only for what comes from processes of the same run: it can run any code.
    """
    return pickle.loads(data)


class _Pickler(cloudpickle.Pickler):
    """torch's own way is made for files: ten times slower for the many small tensors of a step's
    metrics, and bound to the device.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            flat = obj.detach().cpu().contiguous().view(-1)
            data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is one
            return _tensor, (data, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """It keeps the buffer that it was read into."""
    return (
        torch.frombuffer(data, dtype=dtype).view(shape)
        if len(data)
        else torch.empty(shape, dtype=dtype)
    )

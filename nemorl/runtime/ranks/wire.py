"""Python objects as bytes for ranks: closures travel whole, tensors arrive on the CPU."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 20
"""From so many bytes on, a tensor travels beside the pickled object, without a copy."""


def dumps(value: Any) -> list[Any]:
    """Return the pickled object, and the numbers of its large tensors.

    >>> loads(dumps({"x": torch.ones(2, dtype=torch.bfloat16), "f": lambda x: x + 1}))["f"](1)
    2
    """
    file, large = io.BytesIO(), []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        array = np.frombuffer(buffer.raw(), np.uint8)
        if array.nbytes >= LARGE:
            large.append(array)
        return array.nbytes < LARGE

    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(value)
    return [file.getvalue(), *large]


def loads(data: Sequence[Any]) -> Any:
    """Return what `dumps` was given. It can run any code: only for processes of the same run."""
    return pickle.loads(data[0], buffers=data[1:])


class _Pickler(cloudpickle.Pickler):
    """torch's own way is ten times slower for the many small tensors of a step's metrics."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            flat = obj.detach().cpu().contiguous().view(-1)
            data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            return _tensor, (data, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if memoryview(data).readonly:  # in Ray's memory
        data = bytearray(data)
    return torch.frombuffer(data, dtype=dtype).view(shape)

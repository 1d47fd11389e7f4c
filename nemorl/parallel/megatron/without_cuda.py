"""Any other device where megatron-core asks for CUDA. On a GPU of CUDA nothing is changed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from nemorl.parallel.megatron.core import random, token_dispatcher


class _CudaIs(TorchFunctionMode):
    """Creates tensors on a device where code says "cuda"; types are named as those on GPUs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        if kwargs and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **(kwargs or {}))


class _Stream:
    """Stands for a CUDA stream where all is done in order. A class, as annotations may need one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _splits(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return the numbers of tokens that ranks exchange, in the form that this needs."""
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def runtime(device: torch.device) -> Iterator[None]:
    """Run megatron-core's functions in the block on this device.

    Its generators for dropout are not used: the models have none.
    """
    with ExitStack() as stack:
        if device.type != "cuda":
            for place, name, function in (
                (torch.cuda, "current_device", lambda: device),
                (torch.cuda, "synchronize", lambda *_: None),
                (torch.cuda, "Stream", _Stream),
                (torch.cuda, "current_stream", _Stream),
                (torch.cuda, "stream", lambda _: nullcontext()),
                (token_dispatcher, "maybe_move_tensor_to_cpu", _splits),
                (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
                (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            ):
                stack.enter_context(patch.object(place, name, function))
            stack.enter_context(_CudaIs(device))
        yield

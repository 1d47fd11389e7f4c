"""The same bits in every run, on GPUs, too."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def use_deterministic_kernels() -> Callable[[], None]:
    """Use only kernels that give the same bits in every run, in the whole process.

    An operation without such a kernel raises a RuntimeError that names it. Call this before the
    model comes to the GPU: cuBLAS reads its setting when it is first used.

    Returns: a function that restores the settings from before.
    """
    cudnn, fill = torch.backends.cudnn, "fill_uninitialized_memory"
    memory: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, getattr(memory, fill)
    workspace = os.environ.get(_WORKSPACE)

    def restore() -> None:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        cudnn.deterministic, cudnn.benchmark = before[:2]
        setattr(memory, fill, before[2])
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)

    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    setattr(memory, fill, False)  # every tensor is written before it is read
    return restore


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use deterministic kernels in the block."""
    restore = use_deterministic_kernels()
    try:
        yield
    finally:
        restore()

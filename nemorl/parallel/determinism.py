"""The same bits in every run, on GPUs, too."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def use_deterministic_kernels() -> Callable[[], None]:
    """From here on only kernels that give the same bits in every run, in the whole process. Returns
    a function that puts back what was set before.

    An operation that has no such kernel then raises a RuntimeError that names it. (A cumsum on a
    GPU, by which top_p and the sampler work, has one, though the documentation of torch 2.13 still
    says that it raises.) cuBLAS reads its setting when it is first used: call this before the model
    comes to the GPU.
    """
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    before_cudnn, before_fill = (
        (cudnn.deterministic, cudnn.benchmark),
        memory.fill_uninitialized_memory,
    )
    before_workspace = os.environ.get(_WORKSPACE)

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before_cudnn
        memory.fill_uninitialized_memory = before_fill
        if before_workspace is None:
            os.environ.pop(_WORKSPACE, None)

    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = (
        False  # every tensor is written before it is read; filling them would only cost time
    )
    return restore


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """`use_deterministic_kernels` for a block."""
    restore = use_deterministic_kernels()
    try:
        yield
    finally:
        restore()

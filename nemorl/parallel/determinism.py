"""The same bits in every run, on GPUs, too."""

import os
from collections.abc import Callable
from typing import Any

import torch

from nemorl.overlapping import Overlapping

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@Overlapping
def deterministic_kernels() -> Callable[[], None]:
    """Use only kernels that give the same bits in every run, in the whole process, in the block.

    An operation without such a kernel raises a RuntimeError. Begin before the model comes to the
    GPU: cuBLAS reads its setting when it is first used.
    """
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # every tensor is written before it is read

    def restore() -> None:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)

    return restore

"""Kernels that give the same bits, and what was set before afterwards."""

import gc
import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemorl.parallel.determinism import deterministic_kernels
from nemorl.rollout.decoding import Slot, SlotTensors, sample_tokens
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.scheduler import Request
from tests.parallel.ways import set_up
from tests.tiny_models import tiny_model


def settings():
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_it_is_on_and_then_as_before(monkeypatch, workspace):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.backends.cudnn.benchmark = True
    before = settings()
    with deterministic_kernels:
        assert settings() == (True, False, True, False, False, workspace or ":4096:8")
    assert settings() == before
    torch.backends.cudnn.benchmark = False


def test_a_backend_that_nobody_shuts_down_restores_them():
    before = settings()
    backend = set_up(tiny_model(), trainer={"deterministic": True})
    assert settings() != before
    del backend
    gc.collect()
    assert settings() == before


def check_sampling(device: torch.device) -> None:
    params = SamplingParams(temperature=0.7, top_k=40_000, top_p=0.9, min_p=1e-6, seed=3)
    for num_rows in (1, 7):
        cpu = torch.randn(num_rows, 150_000, generator=torch.Generator().manual_seed(0))
        logits, request = cpu.to(device), Request(prompt=[0], params=params)
        slots = [Slot(request, sample, limit=8) for sample in range(num_rows)]
        with deterministic_kernels:
            first, *others = (
                sample_tokens(logits, SlotTensors.of(slots, logits.device)) for _ in range(5)
            )
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


class AsOnCuda(TorchDispatchMode):
    """Refuses running sums of floats, for which CUDA has no deterministic kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cumsum.default:
            assert not found.is_floating_point()
        return found


def test_sampling_with_every_filter_has_such_kernels():
    with AsOnCuda():
        check_sampling(torch.device("cpu"))


def test_sampling_with_every_filter_has_such_kernels_on_a_gpu(accelerator: torch.device):
    check_sampling(accelerator)

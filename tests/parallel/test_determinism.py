"""Kernels that give the same bits, and what was set before afterwards."""

import os

import pytest
import torch

from nemorl.parallel.determinism import use_deterministic_kernels


def settings():
    cudnn = torch.backends.cudnn
    return (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.deterministic,
            cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))  # fmt: skip


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_it_is_on_and_then_as_before(monkeypatch, workspace):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.backends.cudnn.benchmark = True
    before = settings()
    restore = use_deterministic_kernels()
    try:
        assert settings() == (True, False, True, False, False, workspace or ":4096:8")
    finally:
        restore()
    assert settings() == before
    torch.backends.cudnn.benchmark = False


@pytest.mark.gpu
def test_what_can_not_be_is_an_error_on_a_gpu():
    restore = use_deterministic_kernels()
    try:
        with pytest.raises(RuntimeError, match="histc"):
            torch.histc(torch.ones(4, device="cuda"))
    finally:
        restore()

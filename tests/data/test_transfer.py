"""Copies for which the host does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from nemorl.data.batch import to_device


@contextmanager
def sync_errors() -> Iterator[None]:
    """Raise where CUDA's host waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_reads_from_pinned_memory_while_the_host_goes_on(monkeypatch: pytest.MonkeyPatch):
    done = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: done.append("pin") or tensor)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, *to, **how: done.append((*to, how)) or tensor
    )
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for device, copies in ((gpu, ["pin"]), (torch.device("meta"), [])):
        to_device({"a": torch.ones(2), "name": "b"}, device)
        assert done == [*copies, (device, {"non_blocking": True})]
        done.clear()
    to_device({"a": torch.ones(2), "name": "b"}, cpu)
    assert done == []  # it is there


def test_what_arrives_is_what_was_sent(accelerator: torch.device):
    """CUDA says where the host waits."""
    sent = [torch.randn(1000), torch.arange(3), torch.ones(0), torch.tensor(True)]
    on_cuda = accelerator.type == "cuda"
    with sync_errors() if on_cuda else nullcontext():
        found = to_device(sent, accelerator)
    assert {x.device.type for x in found} == {accelerator.type}
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, sent, strict=True))

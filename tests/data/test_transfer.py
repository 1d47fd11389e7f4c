"""Copies for which the host does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from nemorl.data.transfer import to_device


@contextmanager
def sync_errors() -> Iterator[None]:
    """Raise where CUDA's host waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_arrives_is_what_was_sent(accelerator: torch.device):
    """CUDA says where the host waits."""
    sent = [torch.randn(1000), torch.arange(3), torch.ones(0), torch.tensor(True)]
    on_cuda = accelerator.type == "cuda"
    with sync_errors() if on_cuda else nullcontext():
        found = to_device(sent, accelerator)
    assert {x.device.type for x in found} == {accelerator.type}
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, sent, strict=True))

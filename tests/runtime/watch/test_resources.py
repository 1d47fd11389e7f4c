import pytest
import torch

from nemorl.runtime.watch.resources import ResourceMeter


def test_memory_that_is_taken_is_seen():
    meter = ResourceMeter()
    before = meter.read()["memory_gb"]
    taken = torch.ones(50_000_000)
    assert meter.read()["memory_gb"] - before == pytest.approx(0.2, abs=0.05)
    del taken


def test_a_gpu_is_asked_and_may_refuse(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 71)
    found = ResourceMeter().read()
    assert (found["gpu_memory_gb"], found["gpu_percent"], calls) == (3.0, 71.0, ["reset"])

    def missing():
        calls.append("asked")
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    meter = ResourceMeter()
    assert "gpu_percent" not in meter.read() | meter.read()
    assert calls.count("asked") == 1, "one refusal is enough"


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """CUDA's own counters, which the test before this one simulates on a CPU."""
    meter = ResourceMeter()
    taken = torch.ones(50_000_000, device="cuda")
    assert meter.read()["gpu_memory_gb"] >= 0.2
    del taken
    assert ResourceMeter().read()["gpu_memory_gb"] >= 0.0

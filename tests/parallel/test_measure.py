"""What a step costs: operations counted by PyTorch itself, times and peaks."""

import subprocess
import sys
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from nemorl.data.batch import Example, collate
from nemorl.losses.types import finalize, merge
from nemorl.models.tiny import tiny_config
from nemorl.models.tiny import tiny_model as tiny_model_of
from nemorl.parallel import measure
from nemorl.parallel.measure import (
    GpuPeaks,
    StepMeter,
    flops_per_step,
    peak_memory,
    segment_lengths,
)
from nemorl.runtime.watch.resources import ResourceMeter
from tests.parallel.batches import grouped, nll_loss
from tests.parallel.ways import set_up
from tests.tiny_models import KINDS, tiny_model

CPU = torch.device("cpu")


def batch_of(lengths: list[int]):
    masks = {n: [False] + [True] * (n - 1) for n in lengths}
    return collate(
        [Example(input_ids=[5] * n, loss_mask=masks[n], response_mask=masks[n]) for n in lengths]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_pytorch_counts_the_same(kind, tied, frozen):
    model, length = tiny_model(kind, tied=tied, hidden_size=48, num_hidden_layers=3), 20
    model.set_attn_implementation("eager")
    # Their gradient is needed, too.
    embedded = model.get_input_embeddings()(torch.full((2, length), 5)).detach().requires_grad_()
    if frozen:
        model.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    config = model.config
    rotary = 2 * 2 * config.head_dim // 2 * length  # its frequencies times positions, once a row
    # Without a causal kernel the pairs above the diagonal are computed, too.
    above = length * (length - 1) // 2
    above *= 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    expected = flops_per_step(config, [length] * 2, frozen_weights=frozen) + 2 * above
    assert counter.get_total_flops() == pytest.approx(expected, abs=2 * rotary)


@pytest.mark.parametrize("kind", ["starcoder2", "phi3", "qwen3_moe", "deepseek_v3"])
def test_pytorch_counts_the_same_of_other_layers(kind):
    """Two matrices in a feed-forward block, fused ones, experts, and latent attention."""
    config = tiny_config(CONFIG_MAPPING[kind]())
    model, length = tiny_model_of(config), 20
    model.set_experts_implementation("eager")  # others compute padding, too
    embedded = model.get_input_embeddings()(torch.full((2, length), 5)).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    pairs = 2 * length * length - sum(range(1, length + 1)) * 2
    heads = flops_per_step(config, [2]) - 2 * flops_per_step(config, (), copied=-1)
    expected = flops_per_step(config, [length] * 2) + pairs * heads / 3  # 3 pairs of two tokens
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)


def step(meter: StepMeter, batch, pause: float = 0.02):
    meter.begin()
    time.sleep(pause)
    return meter.end([batch])


def test_a_step(monkeypatch):
    config, batch = tiny_model().config, batch_of([7, 3])
    monkeypatch.setattr(measure, "peak_flops", lambda device: 1e9)
    found = finalize(step(StepMeter(config, CPU, 4), batch))
    names = {"seconds", "memory_gb", "tflops_per_device", "mfu", "shared_fraction"}
    assert set(found) == {f"trainer/{name}" for name in names}
    assert found["trainer/seconds"] >= 0.02
    flops = flops_per_step(config, [7, 3]) / 4 / found["trainer/seconds"]
    assert found["trainer/tflops_per_device"] == pytest.approx(flops / 1e12)
    assert found["trainer/mfu"] == pytest.approx(flops / 1e9)
    monkeypatch.setattr(measure, "peak_flops", lambda device: None)
    assert "trainer/mfu" not in step(StepMeter(config, CPU, 1), batch)


@pytest.mark.parametrize("size", [None, 2])
def test_a_prompt_that_is_computed_once_counts_once(size: int | None):
    """And twice where its sequences are in two microbatches."""
    batch = grouped([(20, [3, 5, 4, 4])])
    backend = set_up(tiny_model(), trainer={"train_micro_batch_size": size})
    found = backend.train_step(batch, nll_loss)
    work = found["trainer/tflops_per_device"].total * 1e12
    lengths = segment_lengths(batch)
    config, copied = backend.model.config, 60 if size is None else 40
    whole, token = flops_per_step(config, lengths), flops_per_step(config, (), copied=-1)
    assert float(work) == pytest.approx(whole - copied * token)
    assert float(work) < 0.5 * whole or size
    assert finalize(found)["trainer/shared_fraction"] == pytest.approx(copied / sum(lengths))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA T4", None)],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert measure.peak_flops(torch.device("cuda")) == peak


def test_several_steps_and_ranks_are_one_rate():
    """That of both steps together, not the mean of rates; however many ranks there are."""
    meter = StepMeter(tiny_model().config, CPU, 1)
    parts = [step(meter, batch_of([200]), 0.01), step(meter, batch_of([3]), 0.2)]
    both = finalize(merge(*parts))
    work = sum(flops_per_step(meter.model_config, [length]) for length in (200, 3))
    seconds = sum(finalize(part)["trainer/seconds"] for part in parts)
    assert both["trainer/seconds"] == pytest.approx(seconds / 2)
    assert both["trainer/tflops_per_device"] == pytest.approx(work / 1e12 / seconds)
    again = finalize(merge(merge(*parts), merge(*parts)))
    assert again == pytest.approx(both)


def test_the_peak_is_this_process_own():
    """After memory was given back; and not that of the process that started it."""
    taken = torch.ones(100_000_000)
    before = peak_memory(CPU)
    assert before > 4e8
    del taken
    assert peak_memory(CPU) > 0.99 * before  # Linux counts to a few pages
    code = (
        "from nemorl.parallel.measure import *; device = torch.device('cpu');"
        " print(peak_memory(device)); big = torch.ones(50_000_000); del big;"
        " print(peak_memory(device))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    small, large = map(int, done.stdout.split())
    assert large - small == pytest.approx(2e8, rel=0.25)


def test_two_who_restart_one_counter(monkeypatch):
    """What the step's meter restarts, the whole loop's must still see."""
    gpu = {"peak": 0, "now": 0}

    def use(amount: int) -> None:
        gpu.update(peak=max(gpu["peak"], gpu["now"] + amount))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: gpu.update(peak=gpu["now"])
    )
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 0)
    monkeypatch.setattr(measure, "peak_flops", lambda device: None)
    peaks = GpuPeaks()
    monkeypatch.setattr(measure, "gpu_peaks", peaks)
    monkeypatch.setattr("nemorl.runtime.watch.resources.gpu_peaks", peaks)
    whole, meter = ResourceMeter(), StepMeter(tiny_model().config, torch.device("cuda"), 1)
    for generation, training, expected in ((9, 4, 9.0), (2, 5, 5.0), (1, 1, 1.0)):
        use(generation * 10**9)
        meter.begin()
        use(training * 10**9)
        assert finalize(meter.end([batch_of([3])]))["trainer/memory_gb"] == training
        assert whole.read()["gpu_memory_gb"] == expected


@pytest.mark.gpu
def test_on_a_gpu():
    """CUDA's own counters, which the test before this one simulates on a CPU."""
    meter = StepMeter(tiny_model().config, torch.device("cuda"), 1)
    before = torch.ones(100_000_000, device="cuda")
    del before
    meter.begin()
    taken = torch.ones(50_000_000, device="cuda")
    found = finalize(meter.end([batch_of([7, 3])]))
    assert 0.2 <= found["trainer/memory_gb"] < 0.3 and found["trainer/seconds"] > 0
    assert (
        torch.cuda.max_memory_allocated() < 3e8 and ResourceMeter().read()["gpu_memory_gb"] >= 0.4
    )
    del taken

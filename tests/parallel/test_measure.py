"""What a step costs: operations counted by PyTorch itself, times and peaks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from nemorl.data.batch import Example, collate
from nemorl.losses.types import finalize
from nemorl.models.tiny import tiny_config
from nemorl.models.tiny import tiny_model as tiny_model_of
from nemorl.parallel import measure
from nemorl.parallel.measure import (
    StepMeter,
    flops_per_step,
    main_memory_peak,
    segment_lengths,
)
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.watch.alerts import ResourceMeter
from tests.parallel.batches import grouped, nll_loss
from tests.parallel.ways import set_up
from tests.tiny_models import KINDS, tiny_model

CPU = torch.device("cpu")


def batch_of(lengths: list[int]):
    masks = {n: [False] + [True] * (n - 1) for n in lengths}
    return collate(
        [Example(input_ids=[5] * n, loss_mask=masks[n], response_mask=masks[n]) for n in lengths]
    )


def counted(model, length: int, *, frozen: bool = False) -> int:
    embedded = model.get_input_embeddings()(torch.full((2, length), 5)).detach().requires_grad_()
    model.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_pytorch_counts_the_same(kind, tied, frozen):
    model, length = tiny_model(kind, tied=tied, hidden_size=48, num_hidden_layers=3), 20
    model.set_attn_implementation("eager")
    config = model.config
    rotary = 2 * 2 * config.head_dim // 2 * length  # its frequencies times positions, once a row
    # Without a causal kernel the pairs above the diagonal are computed, too.
    above = length * (length - 1) // 2
    above *= 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    expected = flops_per_step(config, [length] * 2, frozen_weights=frozen) + 2 * above
    assert counted(model, length, frozen=frozen) == pytest.approx(expected, abs=2 * rotary)


@pytest.mark.parametrize("kind", ["starcoder2", "phi3", "qwen3_moe", "deepseek_v3"])
def test_pytorch_counts_the_same_of_other_layers(kind):
    config = tiny_config(CONFIG_MAPPING[kind]())
    model, length = tiny_model_of(config), 20
    model.set_experts_implementation("eager")  # others compute padding, too
    pairs = 2 * length * length - sum(range(1, length + 1)) * 2
    heads = flops_per_step(config, [2]) - 2 * flops_per_step(config, (), copied=-1)
    expected = flops_per_step(config, [length] * 2) + pairs * heads / 3  # 3 pairs of two tokens
    assert counted(model, length) == pytest.approx(expected, rel=2e-3)


def step(meter: StepMeter, batch):
    meter.begin()
    return meter.end([batch])


def test_a_step(monkeypatch):
    config, batch = tiny_model().config, batch_of([7, 3])
    monkeypatch.setattr(measure, "peak_flops", lambda device: 1e9)
    found = finalize(step(StepMeter(config, CPU, ParallelPlan(dp_shard=4)), batch))
    names = {"seconds", "memory_gb", "tflops_per_device", "mfu", "shared_fraction"}
    assert set(found) == {f"trainer/{name}" for name in names}
    flops = flops_per_step(config, [7, 3]) / 4 / found["trainer/seconds"]
    assert found["trainer/tflops_per_device"] == pytest.approx(flops / 1e12)
    assert found["trainer/mfu"] == pytest.approx(flops / 1e9)
    monkeypatch.setattr(measure, "peak_flops", lambda device: None)
    assert "trainer/mfu" not in step(StepMeter(config, CPU, ParallelPlan().on(1)), batch)


@pytest.mark.parametrize("size", [None, 2])
def test_a_prompt_that_is_computed_once_counts_once(size: int | None):
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


@pytest.mark.slow
def test_the_peak_is_this_process_own():
    taken = torch.ones(100_000_000)
    before = main_memory_peak()
    assert before > 4e8
    del taken
    assert main_memory_peak() > 0.99 * before  # Linux counts to a few pages


@pytest.mark.gpu
def test_on_a_gpu():
    meter = StepMeter(tiny_model().config, torch.device("cuda"), ParallelPlan().on(1))
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

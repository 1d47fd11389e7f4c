"""What training keeps on a device, in main memory while engines generate. The device is a CPU here:
memory is really freed and taken anew, only that nothing is pinned.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nemorl.parallel import accumulation
from nemorl.parallel.accumulation import Offloaded
from nemorl.parallel.dtensor.backend import DTensorBackend
from tests.parallel.batches import nll_loss
from tests.parallel.offloaded import FIRST, SECOND, generations, held
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "with a reference": {"keep_reference": True},
    "LoRA": {"lora": {"rank": 2}, "keep_reference": True},
}


def test_memory_goes_and_comes_back_under_the_same_tensors():
    whole = torch.arange(12.0)
    tensors = {"whole": whole, "view": whole.view(3, 4)[1:, ::2], "other": torch.ones(2).bool()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    offloaded = Offloaded()
    offloaded.take(tensors.values())
    offloaded.take([whole])  # which is away already
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(offloaded.present(tensor), before[name])
    assert (
        whole.untyped_storage().nbytes() == 0
        and sum(len(copy) for _, copy in offloaded._away.values()) == 12 * 4 + 2
    )
    offloaded.restore()
    assert not offloaded._away
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert offloaded.present(whole) is whole
    whole[5] = -1
    assert tensors["view"][0, 0] == 4 and whole.view(3, 4)[1, 1] == -1


def test_an_emptied_cache_holds_no_gradient_of_a_step_that_was_taken(monkeypatch):
    emptied: list[str] = []
    empty = partial(emptied.append, "empty_cache")
    monkeypatch.setattr(torch.cpu, "empty_cache", empty, raising=False)
    backend = set_up(tiny_model())
    backend.forward_backward(FIRST, nll_loss)
    backend.empty_cache()
    assert held(backend)["gradients"], "of the next step"
    backend.optim_step()
    backend.empty_cache()
    assert not held(backend)["gradients"] and not emptied
    monkeypatch.setattr(accumulation, "is_accelerator", lambda device: True)
    backend.empty_cache()
    assert emptied == ["empty_cache"]
    backend.shutdown()


def trained(backend: DTensorBackend, path: Path, *, offloads: bool, keep: bool) -> dict[str, Any]:
    found, sizes, generate = generations(backend, held, offloads=offloads, keep=keep)
    generate()
    backend.save_checkpoint(path, background=True)  # numpy would hold on to a CPU's memory
    backend.wait_for_checkpoint()
    backend.train_step(SECOND, nll_loss)
    generate()
    backend.load_checkpoint(path)
    backend.train_step(FIRST, nll_loss)
    found["last"] = generate()
    if offloads:
        initial, trains, after, *_ = sizes
        assert trains["parameters"] and trains["optimizer"] and trains["gradients"]
        kept = trains["parameters"] if keep else 0
        for size in (initial, after, sizes[-1]):
            assert size == {"parameters": kept, "gradients": 0, "optimizer": 0, "reference": 0}
        assert all(size["gradients"] == 0 for size in (*sizes[:1], *sizes[2:]))
    return found


def model(kind: str) -> nn.Module:
    return tiny_model(scale=2.0, tied=kind != "LoRA")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_same_bits(kind: str, keep: bool, tmp_path: Path):
    found = []
    for offloads in (True, False):
        backend = set_up(model(kind), **KINDS[kind])
        given = backend.model
        found.append(trained(backend, tmp_path / str(offloads), offloads=offloads, keep=keep))
        backend.shutdown()  # and the model is handed back with its weights
        found[-1]["model"] = dict(given.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def on_rank(folder: Path, path: Path, options: dict[str, Any]) -> Any:
    found = []
    for offloads in (True, False):
        plan = {"dp_shard": 2, "param_dtype": "bfloat16"}
        backend = set_up(None, folder, plan=plan, **options)
        assert all(isinstance(p, DTensor) for p in backend.model.parameters())
        found.append(trained(backend, path / str(offloads), offloads=offloads, keep=False))
        backend.shutdown()
    torch.testing.assert_close(*found, rtol=0, atol=0)
    return found[0]["last"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["with a reference", "LoRA"])
def test_ranks_have_the_same_bits(kind: str, tmp_path: Path):
    model(kind).save_pretrained(tmp_path / "model")
    one, other = run_ranks(2, on_rank, tmp_path / "model", tmp_path, KINDS[kind])
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_gpu_is_empty_meanwhile(accelerator: torch.device):
    on_cuda = accelerator.type == "cuda"
    model = tiny_model(scale=2.0, hidden_size=512).to(accelerator)
    backend = set_up(model, trainer={"device": str(accelerator)}, keep_reference=True)
    backend.train_step(FIRST, nll_loss)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    size = sum(held(backend).values())
    full = torch.cuda.memory_allocated() if on_cuda else size
    backend.offload()
    left = torch.cuda.memory_allocated() if on_cuda else sum(held(backend).values())
    assert 0 < size <= full - left
    assert all(copy.is_pinned() for _, copy in backend._away._away.values())
    for name, tensor in backend.weights():
        assert torch.equal(tensor, before[name]) and tensor.device.type == accelerator.type
    backend.get_logprobs(FIRST)
    assert sum(held(backend).values()) == size
    backend.shutdown()

"""Adapters over weights in 4 bits: against the same weights in float32, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemorl.losses.types import finalize
from nemorl.models.adapters import dequantize_layers, quantize_layers
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.lora import adapter_tensors
from tests.parallel.batches import LENGTHS, nll_loss, random_batch
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

bitsandbytes = pytest.importorskip("bitsandbytes")


def wide_model() -> nn.Module:
    return tiny_model(hidden_size=128, intermediate_size=192, head_dim=32, scale=1.0)


def rounded_model() -> nn.Module:
    model = wide_model()
    quantize_layers(model, device=torch.device("cpu"), dtype=torch.float32)
    dequantize_layers(model)
    return model


def backend(
    model: nn.Module, quantize: str = "nf4", lora: Any = None, **plan: Any
) -> DTensorBackend:
    lora = {"rank": 4, "alpha": 8.0, "quantize": quantize, **(lora or {})}
    return set_up(model, lora=lora, plan=plan, keep_reference=True)


def step(made: DTensorBackend) -> dict[str, float]:
    return finalize(made.train_step(random_batch(LENGTHS, seed=made.step), nll_loss))


def values(tensors: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in dict(tensors).items()}


FULL = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    "options", [{}, FULL, {"lora": {"target_modules": ("q_proj", "down_proj")}}], ids=str
)
def test_it_trains_as_over_the_weights_that_4_bits_stand_for(options):
    made, plain = backend(wide_model(), **options), backend(rounded_model(), "none", **options)
    batch = random_batch(LENGTHS)
    for _ in range(4):
        found, expected = step(made), step(plain)
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
    near: dict[str, Any] = {"atol": 1e-5, "rtol": 0}
    ours, theirs = (values(adapter_tensors(each.model)) for each in (made, plain))
    torch.testing.assert_close(ours, theirs, **near)
    torch.testing.assert_close(values(made.weights()), values(plain.weights()), **near)
    for read in ("get_logprobs", "get_reference_logprobs"):
        one, other = (getattr(each, read)(batch).values for each in (made, plain))
        torch.testing.assert_close(one, other, **near)
    assert (made.get_logprobs(batch).values - one).abs().max() > 0.01


def test_what_is_exported_and_handed_back_is_what_was_trained():
    model = wide_model()
    made = backend(model)
    for _ in range(3):
        step(made)
    batch = random_batch(LENGTHS)
    live, exported = made.get_logprobs(batch).values, values(made.weights())
    assert exported.keys() == dict(wide_model().named_parameters()).keys()
    made.shutdown()
    assert list(model.state_dict()) == list(wide_model().state_dict())
    torch.testing.assert_close(values(model.named_parameters()), exported, atol=0, rtol=0)
    again = backend(model, "none")
    torch.testing.assert_close(again.get_logprobs(batch).values, live, atol=1e-5, rtol=0)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path):
    made = backend(wide_model())
    for _ in range(2):
        step(made)
    made.save_checkpoint(tmp_path / "saved")
    expected = [step(made)["loss"] for _ in range(2)]
    again = backend(wide_model())
    again.load_checkpoint(tmp_path / "saved")
    assert [step(again)["loss"] for _ in range(2)] == expected
    ours, theirs = (values(adapter_tensors(each.model)) for each in (made, again))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def refusal() -> str:
    try:
        backend(wide_model(), dp_shard=2)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_refuse_it():
    for found in run_ranks(2, refusal):
        assert found.startswith("lora.quantize must be none on ranks, whose FSDP2 can't divide")

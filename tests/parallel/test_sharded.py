"""A model spread over ranks: what is loaded and refused; its numbers are in parity/."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.losses.types import finalize
from nemorl.models.capabilities import ASSUMED
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.lora import adapter_tensors
from nemorl.parallel.megatron.backend import MegatronBackend
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import set_up, weights
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

LENGTHS = [9, 2, 30, 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(scale=2.0, tied=False).save_pretrained(path)
    return path


def loaded(folder: Path, scratch: bool, lora: int, plan: dict) -> dict[str, torch.Tensor]:
    options = {"from_scratch": scratch, "lora": {"rank": lora}, "seed": 3}
    backend = set_up(None, folder, plan=plan, **options)
    metrics = finalize(backend.train_step(random_batch(LENGTHS), nll_loss))
    return weights(backend) | {"loss": torch.tensor(metrics["loss"]), "base": backend._base}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scratch", "lora", "plan"),
    [
        (True, 0, {"dp_shard": 2}),
        (False, 4, {"dp_shard": 2}),
        (False, 4, {"tp": 2}),
        (False, 4, {"tp": 2, "sequence_parallel": False}),
        (False, 4, {"dp_shard": 2, "tp": 2}),
    ],
    ids=["from scratch", "LoRA", "LoRA, TP + SP", "LoRA, TP", "LoRA, FSDP2 x TP + SP"],
)
def test_it_begins_with_the_weights_of_one_process(folder, scratch, lora, plan):
    plain = set_up(None, folder, from_scratch=scratch, lora={"rank": lora}, seed=3)
    loss = finalize(plain.train_step(random_batch(LENGTHS), nll_loss))["loss"]
    ranks = 2 * plan.get("tp", 1) if "dp_shard" in plan else 2
    for found in run_ranks(ranks, loaded, folder, scratch, lora, plan):
        assert float(found.pop("loss")) == pytest.approx(loss, abs=2e-6)
        assert found.pop("base") == plain._base
        for name, tensor in plain.weights():
            torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=0)


def dropped(folder: Path, sequence_parallel: bool) -> tuple[list[float], list[torch.Tensor]]:
    plan = {"tp": 2, "sequence_parallel": sequence_parallel}
    backend = set_up(None, folder, plan=plan, lora={"rank": 4, "dropout": 0.3})
    batch = random_batch(LENGTHS)
    losses = [finalize(backend.train_step(batch, nll_loss))["loss"] for _ in range(3)]
    adapters = adapter_tensors(backend.model).values()
    whole = [each for each in adapters if each.placements[-1].is_replicate()]
    return losses, [each.to_local().detach().clone() for each in whole]


@pytest.mark.slow
def test_adapters_with_dropout_stay_the_same_on_ranks_of_tensor_parallelism(folder):
    found = [each for on in (True, False) for each in run_ranks(2, dropped, folder, on)]
    assert len(found[0][1]) == 2 * 7
    for losses, whole in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(whole, found[0][1], atol=1e-4, rtol=0)
    assert all(map(torch.equal, found[0][1], found[1][1]))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        set_up(None, folder)
    return str(caught.value)


@pytest.mark.slow
def test_a_missing_weight_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    for found in run_ranks(2, refusal, tmp_path / "model"):
        assert "lm_head.weight is missing (1 in all)" in found


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": 2}, "the 1 devices that there are"),
        ({"cpu_offload": True}, "needs a process started as a rank"),
    ],
    ids=str,
)
def test_what_one_process_by_itself_refuses(folder, plan, message):
    with pytest.raises(ValueError, match=message):
        set_up(None, folder, plan=plan)


UNUSED = ("model.layers.7.mlp.up_proj.weight", "model.visual.weight")
BESIDE = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
"""What files may have besides: a copy of tied weights, and frequencies."""


def add(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    copied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    more = {name: copied.get(name, torch.zeros(3)).clone() for name in names}
    save_file({**tensors, **more}, file, {"format": "pt"})


def said(load: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load()
    return [str(each.message) for each in found if "does not use" in str(each.message)]


def said_by(make: Any, folder: Path) -> list[str]:
    options = {"plan": {"dp_shard": 1, "tp": 2}, "keep_reference": True, "proofs": ASSUMED}
    return said(lambda: set_up(None, folder, make=make, **options).shutdown())


@pytest.mark.slow
@pytest.mark.parametrize("make", [DTensorBackend, MegatronBackend])
def test_the_first_rank_says_once_what_files_have_besides(make: Any, tmp_path: Path):
    tiny_model("llama").save_pretrained(tmp_path)
    add(tmp_path, *BESIDE)
    assert said(lambda: load_causal_lm(str(tmp_path))) == []
    assert run_ranks(2, said_by, make, tmp_path) == [[], []]
    add(tmp_path, *UNUSED)
    whole = said(lambda: load_causal_lm(str(tmp_path)))
    assert whole == [f"the model does not use {', '.join(UNUSED)} of its files (2 in all)"]
    assert run_ranks(2, said_by, make, tmp_path) == [whole, []]

"""Runs with LoRA, from the settings to the exported folder."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import nemorl
from nemorl.models.causal_lm import load_causal_lm
from nemorl.runtime.store import checkpoint
from nemorl.runtime.watch.callbacks import Callback
from tests.parallel.batches import random_batch
from tests.runtime.runs import (
    addition_rows,
    dpo_config,
    grpo_config,
    preference_rows,
    rows_file,
    saved_model,
    sft_config,
    start,
)
from tests.runtime.tiny import flip_a_bit
from tests.tiny_models import tiny_model, tiny_tokenizer

LORA = nemorl.LoRAConfig(rank=8, alpha=16.0)
ADAPTER = nemorl.LoRAConfig(rank=8, alpha=16.0, export="adapter")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(random_batch([40]).input_ids, use_cache=False).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder, as a user has one."""
    return saved_model(tmp_path / "base")


def by_name(config: Any, base: Path) -> nemorl.TrainResult:
    return nemorl.run(
        replace(config, model=nemorl.ModelConfig(path=str(base))),
        train=addition_rows(),
        reward=None,
    )


@pytest.mark.slow
def test_grpo_learns_with_adapters(tmp_path: Path):
    """The reference is the model without them, so that the KL penalty begins at 0 and then doesn't
    stay there.
    """
    config = grpo_config(
        tmp_path, steps=40, lora=LORA, kl=nemorl.KLConfig(coef=1e-3), run={"export": True}
    )
    result = start(config, scale=10.0)
    rewards, kl = ([line[name] for line in result.history] for name in ("reward", "kl"))
    assert sum(rewards[-3:]) / 3 > 0.8 > 0.4 > rewards[0]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0.1
    gaps = [abs(line["token_mult_prob_error"] - 1) for line in result.history]
    assert max(gaps) < 1e-4, "the sampler has the adapters, too"
    torch.testing.assert_close(
        logits(load_causal_lm(str(result.paths.hf))), logits(result.model), atol=1e-5, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["live", "precomputed"])
def test_dpo_learns_with_adapters(tmp_path: Path, reference):
    """The first loss is log 2, as the policy is its own reference."""
    trainer = nemorl.TrainerConfig(device="cpu", sequence_packing=True)
    options: dict[str, Any] = {"lora": LORA, "reference": reference, "trainer": trainer}
    validation = preference_rows(40, seed=1)
    result = start(
        dpo_config(tmp_path / "straight", steps=24, **options), validation=validation, scale=10.0
    )
    assert result.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert result.metrics["loss"] < 0.2
    assert result.metrics["val_accuracy"] > 0.8


class Watch(Callback):
    """What training changes in the model's own weights, and whether there is a second model."""

    def on_train_begin(self, trainer) -> None:
        self.before = self.weights(trainer)
        self.copy = trainer.trainer._reference

    def on_train_end(self, trainer, metrics) -> None:
        after = self.weights(trainer)
        self.changed = [name for name in after if not torch.equal(after[name], self.before[name])]

    def weights(self, trainer) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in trainer.trainer.model.state_dict().items()
            if ".lora_" not in name
        }


@pytest.mark.parametrize("make", [sft_config, grpo_config, dpo_config])
def test_the_base_is_neither_copied_nor_changed(tmp_path: Path, make):
    options = {"kl": nemorl.KLConfig(coef=0.1)} if make is grpo_config else {}
    watch, control = Watch(), Watch()
    start(make(tmp_path / "lora", lora=LORA, **options), callbacks=[watch])
    assert (watch.copy, watch.changed) == (None, [])
    start(make(tmp_path / "whole", **options), callbacks=[control])
    assert (control.copy is not None) == (make is not sft_config) and len(control.changed) > 10


def assert_equal_logits(model: nn.Module, expected: Tensor) -> None:
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


def test_adapter_export(tmp_path: Path, base: Path):
    """hf/ is a folder that PEFT loads, by itself and onto a base; nemorl takes it wherever it takes
    a model.
    """
    result = by_name(sft_config(tmp_path / "run", run={"export": True}, lora=ADAPTER), base)
    hf = result.paths.hf
    names = {path.name for path in hf.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not list(hf.glob("model*.safetensors"))
    expected = logits(result.model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert_equal_logits(PeftModel.from_pretrained(plain, hf), expected)
    assert_equal_logits(AutoPeftModelForCausalLM.from_pretrained(hf), expected)
    assert AutoTokenizer.from_pretrained(hf).get_vocab() == tiny_tokenizer().get_vocab()
    rows = rows_file(tmp_path / "rows.jsonl", addition_rows(4))
    of_run, of_folder = (
        nemorl.evaluate(path, rows, device="cpu") for path in (tmp_path / "run", hf)
    )
    assert of_run["num_rows"] == 4 and of_run["answers"] == of_folder["answers"]
    more = sft_config(tmp_path / "again", steps=1, run={"export": True}, lora=LORA)
    assert (by_name(more, hf).paths.hf / "config.json").exists(), "trained on, with new adapters"


def test_export_of_a_checkpoint(tmp_path: Path, base: Path):
    result = by_name(sft_config(tmp_path / "run", lora=LORA), base)
    expected, run = logits(result.model), str(tmp_path / "run")
    merged = nemorl.export(run=run, output=str(tmp_path / "merged"))
    assert_equal_logits(AutoModelForCausalLM.from_pretrained(merged), expected)
    assert not (merged / "adapter_config.json").exists()
    out = str(tmp_path / "adapter")
    adapter = nemorl.export(run=run, output=out, lora="adapter")
    assert_equal_logits(AutoPeftModelForCausalLM.from_pretrained(adapter), expected)
    nemorl.export(run=run, output=out)  # which replaces the other kind
    assert (adapter / "config.json").exists() and not (adapter / "adapter_config.json").exists()


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["while it is copied", "before"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, monkeypatch, small):
    start(sft_config(tmp_path / "run", steps=1, lora=LORA))
    trainer = tmp_path / "run" / "checkpoints" / "step_1" / "policy"
    flip_a_bit(next(trainer.glob("*model.safetensors")))
    monkeypatch.setattr(checkpoint, "SMALL", small)
    options = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out"), "step": 1}
    with pytest.raises(OSError, match=r"model\.safetensors is damaged"):
        nemorl.export(**options)
    assert not (tmp_path / "out").exists()


def test_a_base_that_was_named_from_here_is_found_from_elsewhere(
    tmp_path: Path, base: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    by_name(sft_config(tmp_path / "run", steps=1, lora=LORA), Path(base.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = nemorl.export(run=str(tmp_path / "run"), output="out")
    assert (found / "config.json").exists()


def test_export_when_the_base_has_moved_or_changed(tmp_path: Path, base: Path):
    result = by_name(sft_config(tmp_path / "run", lora=LORA), base)
    moved = str(base.rename(tmp_path / "elsewhere"))
    options: dict[str, Any] = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out")}
    message = r"base_model must name .*base' could not be loaded.*--base-model"
    with pytest.raises(ValueError, match=message):
        nemorl.export(**options)
    found = nemorl.export(**options, base_model=moved)
    assert_equal_logits(AutoModelForCausalLM.from_pretrained(found), logits(result.model))
    adapter = nemorl.export(**options, base_model=moved, lora="adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == moved
    tiny_model(seed=4).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="began with other weights"):
        nemorl.export(**options, base_model=str(tmp_path / "other"))


def test_export_of_a_model_that_came_in_memory(tmp_path: Path, base: Path):
    result = start(sft_config(tmp_path / "run", lora=LORA))
    options: dict[str, Any] = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out")}
    message = r"base_model must name the model that .*in memory.*--base-model"
    with pytest.raises(ValueError, match=message):
        nemorl.export(**options)
    merged = nemorl.export(**options, base_model=str(base))
    assert_equal_logits(AutoModelForCausalLM.from_pretrained(merged), logits(result.model))


def test_a_run_goes_on_with_its_own_kind_of_training(tmp_path: Path):
    start(sft_config(tmp_path, steps=2, lora=LORA))
    again = sft_config(tmp_path, steps=3, run={"resume": True})
    with pytest.raises(ValueError, match=r"lora.rank must be above 0, as when .*step_2"):
        start(again)
    with pytest.warns(UserWarning, match=r"lora.dropout is 0.1, was 0.0"):
        start(replace(again, lora=replace(LORA, dropout=0.1)))


def test_the_checkpoint_is_small(tmp_path: Path):
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    start(sft_config(tmp_path, steps=1, lora=nemorl.LoRAConfig(rank=1)), **sizes)
    files = list((tmp_path / "checkpoints" / "step_1" / "policy").iterdir())
    assert "model.safetensors" not in {path.name for path in files}
    whole = 4 * sum(p.numel() for p in tiny_model(**sizes).parameters())
    assert sum(path.stat().st_size for path in files) < 0.2 * whole

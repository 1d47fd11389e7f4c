"""Runs with LoRA, from the settings to the exported folder."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import nemorl
from nemorl.models.adapters import has_adapters
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.run.callbacks import Callback
from tests.parallel.batches import random_batch
from tests.runtime.runs import (
    TIMES,
    addition_rows,
    dpo_config,
    grpo_config,
    preference_rows,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

LORA = nemorl.LoRAConfig(rank=8, alpha=16.0)
ADAPTER = nemorl.LoRAConfig(rank=8, alpha=16.0, export="adapter")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(random_batch([40]).input_ids, use_cache=False).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder, as a user has one."""
    tiny_model(scale=2.0).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def by_name(config: Any, base: Path) -> nemorl.TrainResult:
    return nemorl.run(
        replace(config, model=nemorl.ModelConfig(path=str(base))),
        train=addition_rows(),
        reward=None,
    )


def test_sft_learns_with_adapters(tmp_path: Path):
    """As without: 35 different sums become right answers. hf/ is a whole model, and the result is a
    plain one with the same answers.
    """
    trainer, plan = (
        nemorl.TrainerConfig(device="cpu", sequence_packing=True),
        nemorl.ParallelPlan(activation_checkpointing="full"),
    )
    config = sft_config(
        tmp_path,
        steps=120,
        run={"export": True},
        lora=nemorl.LoRAConfig(rank=16),
        trainer=trainer,
        parallel=plan,
    )
    result = start(config, validation=addition_rows(35), scale=10.0)
    assert result.metrics["loss"] < result.history[0]["loss"] / 10
    assert result.metrics["val_accuracy"] > 0.9
    assert not has_adapters(result.model)
    exported = AutoModelForCausalLM.from_pretrained(result.paths.hf)
    torch.testing.assert_close(logits(exported), logits(result.model), atol=1e-5, rtol=0)
    assert (logits(exported) - logits(tiny_model(scale=10.0))).abs().max() > 0.1


def test_grpo_learns_with_adapters(tmp_path: Path):
    """The reference is the model without them, so that the KL penalty begins at 0 and then doesn't
    stay there.
    """
    config = grpo_config(
        tmp_path, steps=25, lora=LORA, kl=nemorl.KLConfig(coef=1e-3), run={"export": True}
    )
    result = start(config, scale=10.0)
    rewards, kl = ([line[name] for line in result.history] for name in ("reward", "kl"))
    assert sum(rewards[-3:]) / 3 > 0.8 > 0.4 > rewards[0]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0.1
    assert (
        max(abs(line["token_mult_prob_error"] - 1) for line in result.history) < 1e-4
    )  # the sampler has the adapters, too
    torch.testing.assert_close(
        logits(load_causal_lm(str(result.paths.hf))), logits(result.model), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("reference", ["live", "precomputed"])
def test_dpo_learns_with_adapters(tmp_path: Path, reference):
    """The first loss is log 2, as the policy is its own reference.

    A run that is taken up again ends with the numbers of one without a break.
    """
    trainer = nemorl.TrainerConfig(device="cpu", sequence_packing=True)
    options: dict[str, Any] = {"lora": LORA, "reference": reference, "trainer": trainer}
    validation = preference_rows(40, seed=1)
    result = start(
        dpo_config(tmp_path / "straight", steps=24, **options), validation=validation, scale=10.0
    )
    assert result.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert result.metrics["loss"] < 0.2
    assert result.metrics["val_accuracy"] > 0.8
    start(dpo_config(tmp_path / "broken", steps=12, **options), validation=validation, scale=10.0)
    resumed = start(
        dpo_config(tmp_path / "broken", steps=24, run={"resume": True}, **options),
        validation=validation,
        scale=10.0,
    )
    assert all(
        resumed.metrics[name] == value
        for name, value in result.metrics.items()
        if name.removeprefix("val_") not in TIMES
    )


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


def test_adapter_export(tmp_path: Path, base: Path):
    """hf/ is a folder that PEFT loads, by itself and onto a base; nemorl takes it wherever it takes
    a model.
    """
    result = by_name(sft_config(tmp_path / "run", run={"export": True}, lora=ADAPTER), base)
    hf = result.paths.hf
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        path.name for path in hf.iterdir()
    }
    assert not list(hf.glob("model*.safetensors"))
    expected = logits(result.model)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), hf)),
        expected,
        atol=1e-5,
        rtol=0,
    )
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(hf)), expected, atol=1e-5, rtol=0
    )
    assert AutoTokenizer.from_pretrained(hf).get_vocab() == tiny_tokenizer().get_vocab()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in addition_rows(4))
    )
    of_run, of_folder = (
        nemorl.evaluate(
            nemorl.EvalConfig(model=str(p), data=str(tmp_path / "rows.jsonl"), device="cpu")
        )
        for p in (tmp_path / "run", hf)
    )
    assert of_run["num_rows"] == 4 and of_run["answers"] == of_folder["answers"]
    again = by_name(
        sft_config(tmp_path / "again", steps=1, run={"export": True}, lora=LORA), hf
    )  # trained on, with new adapters
    assert (again.paths.hf / "config.json").exists()


def test_export_of_a_checkpoint(tmp_path: Path, base: Path):
    result = by_name(sft_config(tmp_path / "run", lora=LORA), base)
    expected = logits(result.model)
    run = str(tmp_path / "run")
    merged = nemorl.export(nemorl.ExportConfig(run=run, output=str(tmp_path / "merged")))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5, rtol=0
    )
    assert not (merged / "adapter_config.json").exists()
    adapter = nemorl.export(
        nemorl.ExportConfig(run=run, output=str(tmp_path / "adapter"), lora="adapter")
    )
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(adapter)), expected, atol=1e-5, rtol=0
    )
    nemorl.export(
        nemorl.ExportConfig(run=run, output=str(adapter))
    )  # an earlier export is replaced, whatever its kind
    assert (adapter / "config.json").exists() and not (adapter / "adapter_config.json").exists()


def test_a_base_that_was_named_from_here_is_found_from_elsewhere(
    tmp_path: Path, base: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    by_name(sft_config(tmp_path / "run", steps=1, lora=LORA), Path(base.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (
        nemorl.export(nemorl.ExportConfig(run=str(tmp_path / "run"), output="out")) / "config.json"
    ).exists()


def test_export_when_the_base_has_moved_or_changed(tmp_path: Path, base: Path):
    result = by_name(sft_config(tmp_path / "run", lora=LORA), base)
    base.rename(tmp_path / "elsewhere")
    options: dict[str, Any] = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out")}
    with pytest.raises(
        ValueError, match=r"base_model must name .*base' could not be loaded.*--base-model"
    ):
        nemorl.export(nemorl.ExportConfig(**options))
    found = nemorl.export(nemorl.ExportConfig(**options, base_model=str(tmp_path / "elsewhere")))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(found)), logits(result.model), atol=1e-5, rtol=0
    )
    adapter = nemorl.export(
        nemorl.ExportConfig(**options, base_model=str(tmp_path / "elsewhere"), lora="adapter")
    )
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "elsewhere")
    tiny_model(seed=4).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="began with other weights"):
        nemorl.export(nemorl.ExportConfig(**options, base_model=str(tmp_path / "other")))


def test_export_of_a_model_that_came_in_memory(tmp_path: Path):
    result = start(sft_config(tmp_path / "run", lora=LORA))
    options: dict[str, Any] = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out")}
    with pytest.raises(
        ValueError,
        match=(
            r"base_model must name the model that the adapters belong to.*in memory.*--base-model"
        ),
    ):
        nemorl.export(nemorl.ExportConfig(**options))
    tiny_model(scale=2.0).save_pretrained(tmp_path / "base")
    merged = nemorl.export(nemorl.ExportConfig(**options, base_model=str(tmp_path / "base")))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(merged)),
        logits(result.model),
        atol=1e-5,
        rtol=0,
    )


def test_export_of_a_run_without_adapters_takes_no_lora_settings(tmp_path: Path):
    start(sft_config(tmp_path / "run", steps=1))
    options: dict[str, Any] = {"run": str(tmp_path / "run"), "output": str(tmp_path / "out")}
    with pytest.raises(
        ValueError,
        match="lora must be merged for a run that trained the whole model, but it is 'adapter'",
    ):
        nemorl.export(nemorl.ExportConfig(**options, lora="adapter"))
    with pytest.raises(
        ValueError, match="base_model must be omitted for a run that trained the whole model"
    ):
        nemorl.export(nemorl.ExportConfig(**options, base_model="here"))
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_with_its_own_kind_of_training(tmp_path: Path):
    start(sft_config(tmp_path, steps=2, lora=LORA))
    with pytest.raises(ValueError, match=r"lora.rank must be above 0, as when .*step_2"):
        start(sft_config(tmp_path, steps=4, run={"resume": True}))
    with pytest.warns(UserWarning, match=r"lora.dropout is 0.1, was 0.0"):
        start(
            sft_config(
                tmp_path,
                steps=3,
                run={"resume": True},
                lora=nemorl.LoRAConfig(rank=8, alpha=16.0, dropout=0.1),
            )
        )


def test_the_checkpoint_is_small(tmp_path: Path):
    start(
        sft_config(tmp_path, steps=1, lora=nemorl.LoRAConfig(rank=1)),
        hidden_size=128,
        intermediate_size=256,
    )
    files = list((tmp_path / "checkpoints" / "step_1" / "trainer").iterdir())
    assert "model.safetensors" not in {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 0.2 * 4 * sum(
        p.numel() for p in tiny_model(hidden_size=128, intermediate_size=256).parameters()
    )


def test_settings_reach_the_backend(tmp_path: Path, monkeypatch):
    seen = []
    setup = DTensorBackend.setup
    monkeypatch.setattr(
        DTensorBackend,
        "setup",
        lambda self, config: (seen.append(config.lora), setup(self, config))[1],
    )
    lora = nemorl.LoRAConfig(
        rank=3, alpha=5.0, dropout=0.2, target_modules=("q_proj",), export="adapter"
    )
    start(sft_config(tmp_path, steps=1, lora=lora))
    assert seen == [lora]


def test_settings_on_the_command_line_and_in_yaml(tmp_path: Path, capsys):
    flags = [
        "--lora.rank",
        "4",
        "--lora.alpha",
        "8",
        "--lora.target-modules",
        "q_proj",
        "v_proj",
        "--lora.export",
        "adapter",
    ]
    assert (
        nemorl.main(
            ["sft", "--model.path", "m", "--data.train", "rows.jsonl", *flags, "--print-config"]
        )
        == 0
    )
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    lora = nemorl.LoRAConfig(
        rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"), export="adapter"
    )
    assert nemorl.load_config(nemorl.SFTConfig, path).lora == lora
    for bad, message in [
        (["--lora.alpha", "8"], "lora.alpha"),
        (["--lora.rank", "4", "--model.from-scratch"], "model.from_scratch"),
    ]:
        assert nemorl.main(["sft", "--model.path", "m", "--data.train", "rows.jsonl", *bad]) == 2
        assert message in capsys.readouterr().err


def test_peft_is_imported_for_adapters_only():
    code = (
        "import sys, nemorl.runtime.start.launch, nemorl.runtime.cli.inference,"
        " nemorl.parallel.dtensor.backend as b; print('peft' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )

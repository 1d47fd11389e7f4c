"""Runs of a model that is loaded already: taken up again with the right one, and handed back
whatever happens.
"""

from pathlib import Path

import pytest

import nemorl
from nemorl.models.adapters import has_adapters
from nemorl.models.pretrained import model_folder
from nemorl.parallel.dtensor.backend import DTensorBackend
from tests.runtime.runs import (
    addition_rows,
    digits,
    dpo_config,
    grpo_config,
    numbers,
    preference_rows,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

WITH_REFERENCE = {
    "live": lambda folder, **kw: dpo_config(folder, reference="live", **kw),
    "precomputed": lambda folder, **kw: dpo_config(folder, reference="precomputed", **kw),
    "grpo": lambda folder, **kw: grpo_config(folder, kl=nemorl.KLConfig(coef=0.5), **kw),
}


def go(config, model) -> nemorl.TrainResult:
    dpo = isinstance(config, nemorl.DPOConfig)
    options = {"reward": digits} if isinstance(config, nemorl.GRPOConfig) else {}
    return nemorl.run(
        config,
        model=model,
        tokenizer=tiny_tokenizer(),
        train=preference_rows() if dpo else addition_rows(),
        **options,
    )


@pytest.mark.parametrize(
    "kind", ["live", *(pytest.param(k, marks=pytest.mark.slow) for k in ("precomputed", "grpo"))]
)
def test_a_trained_model_is_not_taken_for_the_reference(kind, tmp_path: Path, monkeypatch):
    make = WITH_REFERENCE[kind]
    model = tiny_model(scale=2.0)
    go(make(tmp_path / "run", steps=1), model)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ValueError, match="began with other weights: load the initial model of that run again"
        ),
    ):
        patch.setattr(
            DTensorBackend,
            "get_logprobs",
            lambda self, batch: pytest.fail("refused only after a pass over the data"),
        )
        go(make(tmp_path / "run", steps=2, run={"resume": True}), model)
    resumed = go(make(tmp_path / "run", steps=2, run={"resume": True}), tiny_model(scale=2.0))
    straight = go(make(tmp_path / "straight", steps=2), tiny_model(scale=2.0))
    assert numbers(resumed.metrics) == numbers(straight.metrics)


@pytest.mark.parametrize("make", [sft_config, grpo_config])
def test_without_a_reference_any_model_of_its_kind_goes_on(make, tmp_path: Path):
    """Its weights are replaced.

    What the run began with is remembered all the same, for a reference that is asked for later.
    """
    model = tiny_model(scale=2.0)
    go(make(tmp_path / "run", steps=1), model)
    resumed = go(make(tmp_path / "run", steps=2, run={"resume": True}), model)
    straight = go(make(tmp_path / "straight", steps=2), tiny_model(scale=2.0))
    assert numbers(resumed.metrics) == numbers(straight.metrics)
    if make is grpo_config:
        later = grpo_config(
            tmp_path / "run", steps=3, run={"resume": True}, kl=nemorl.KLConfig(coef=0.5)
        )
        with pytest.raises(ValueError, match="began with other weights"):
            go(later, model)
        assert go(later, tiny_model(scale=2.0)).metrics["kl"] > 0


def test_what_lies_about_does_not_make_a_run_of_a_model(tmp_path: Path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert model_folder("") == ""
    assert start(sft_config(tmp_path / "run", steps=1)).metrics["loss"] > 0
    with pytest.raises(ValueError, match="has no hf/ yet"):
        model_folder(str(tmp_path / "run"))
    for file in ("config.json", "adapter_config.json"):
        folder = tmp_path / file.partition(".")[0]
        (folder / "checkpoints").mkdir(parents=True)
        (folder / file).write_text("{}")
        assert model_folder(str(folder)) == str(folder)


def test_random_weights_are_not_for_a_loaded_model(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"model\.from_scratch can't be given together with a loaded model"
    ):
        start(sft_config(tmp_path / "run", model=nemorl.ModelConfig(from_scratch=True)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_in_setup_leaves_the_model_as_it_was(rank, tmp_path: Path, monkeypatch):
    model = tiny_model()
    attention = model.config._attn_implementation
    plan = nemorl.ParallelPlan(activation_checkpointing="full")
    config = sft_config(tmp_path, steps=1, lora=nemorl.LoRAConfig(rank=rank), parallel=plan)
    with monkeypatch.context() as patch:
        patch.setattr("nemorl.parallel.dtensor.backend.make_optimizer", lambda *given: [][0])
        with pytest.raises(IndexError):
            go(config, model)
    assert not has_adapters(model)
    assert (model.config._attn_implementation, model.is_gradient_checkpointing, model.training) == (
        attention,
        False,
        False,
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert go(config, model).metrics["loss"] > 0

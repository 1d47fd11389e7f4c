"""Runs of a model that is loaded already."""

from pathlib import Path

import pytest

import nemorl
from nemorl.models.adapters import has_adapters
from tests.runtime.runs import dpo_config, grpo_config, numbers, sft_config, start
from tests.tiny_models import tiny_model

WITH_REFERENCE = {
    "live": lambda folder, **kw: dpo_config(folder, reference="live", **kw),
    "precomputed": lambda folder, **kw: dpo_config(folder, reference="precomputed", **kw),
    "grpo": lambda folder, **kw: grpo_config(folder, kl=nemorl.KLConfig(coef=0.5), **kw),
}


@pytest.mark.slow_cases("precomputed", "grpo")
@pytest.mark.parametrize("kind", WITH_REFERENCE)
def test_a_trained_model_is_not_taken_for_the_reference(kind, tmp_path: Path):
    make = WITH_REFERENCE[kind]
    model = tiny_model(scale=2.0)
    start(make(tmp_path / "run", steps=1), given=model)
    with pytest.raises(ValueError, match="began with other weights: load the initial model"):
        start(make(tmp_path / "run", steps=2, run={"resume": True}), given=model)
    resumed = start(make(tmp_path / "run", steps=2, run={"resume": True}))
    straight = start(make(tmp_path / "straight", steps=2))
    assert numbers(resumed.metrics) == numbers(straight.metrics)


@pytest.mark.parametrize("make", [sft_config, grpo_config])
def test_without_a_reference_any_model_of_its_kind_goes_on(make, tmp_path: Path):
    """What the run began with is remembered for a reference that is asked for later."""
    model = tiny_model(scale=2.0)
    start(make(tmp_path / "run", steps=1), given=model)
    resumed = start(make(tmp_path / "run", steps=2, run={"resume": True}), given=model)
    straight = start(make(tmp_path / "straight", steps=2))
    assert numbers(resumed.metrics) == numbers(straight.metrics)
    if make is grpo_config:
        later = grpo_config(
            tmp_path / "run", steps=3, run={"resume": True}, kl=nemorl.KLConfig(coef=0.5)
        )
        with pytest.raises(ValueError, match="began with other weights"):
            start(later, given=model)
        assert start(later).metrics["kl"] > 0


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_in_setup_leaves_the_model_as_it_was(rank, tmp_path: Path, monkeypatch):
    model = tiny_model()
    attention = model.config._attn_implementation
    plan = nemorl.ParallelPlan(activation_checkpointing="full")
    config = sft_config(tmp_path, steps=1, lora=nemorl.LoRAConfig(rank=rank), parallel=plan)
    with monkeypatch.context() as patch:
        patch.setattr("nemorl.parallel.dtensor.backend.make_optimizer", lambda *given: [][0])
        with pytest.raises(IndexError):
            start(config, given=model)
    assert not has_adapters(model)
    assert model.config._attn_implementation == attention
    assert not model.is_gradient_checkpointing and not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert start(config, given=model).metrics["loss"] > 0

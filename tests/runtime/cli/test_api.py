"""`nemorl.train` and the trainers are `nemorl.run` under another name."""

import dataclasses
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.runtime.cli import api
from nemorl.runtime.cli.api import _nested, make_config
from nemorl.runtime.config.tree import command_of, key_of, keys_named, leaves, to_dict
from tests.runtime.runs import (
    addition_rows,
    digits,
    grpo_config,
    of_phase,
    saved_model,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

QUIET = {
    "run": {"display": "none", "plots": False, "export": False},
    "device": "cpu",
    "max_total_sequence_length": 32,
    "max_new_tokens": 4,
}
SMALL = {**QUIET, "lr": 1e-2, "max_num_steps": 2}
SIZES = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return saved_model(tmp_path / "model")


def losses(result: nemorl.TrainResult) -> list[float]:
    return [line["loss"] for line in of_phase(result, "train")]


def test_train_is_run(folder: Path, tmp_path: Path):
    result = nemorl.train(model=folder, dataset=addition_rows(), reward_fn=digits, **SMALL, **SIZES)
    assert result.paths.path == Path("runs/grpo") and result.paths.metrics.exists()
    assert losses(result) == losses(start(grpo_config(tmp_path / "other", steps=2)))
    again = nemorl.train(
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        dataset=addition_rows(),
        reward=digits,
        **SMALL,
        **SIZES,
    )
    assert again.paths.path == Path("runs/grpo-2") and losses(again) == losses(result)
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.model.parameters(), result.model.parameters(), strict=True)
    )


def test_trainers_are_run(folder: Path, tmp_path: Path):
    sft = nemorl.SFTTrainer.from_pretrained(folder, train_global_batch_size=16, **SMALL).fit(
        addition_rows()
    )
    assert losses(sft) == losses(start(sft_config(tmp_path / "sft", steps=2)))
    assert sft.paths.path == Path("runs/sft")
    grpo = nemorl.GRPOTrainer.from_pretrained(
        str(folder), preset="dapo", num_prompts_per_step=2, num_generations_per_prompt=4, **SMALL
    )
    assert grpo.config.loss.clip_high == 0.28
    result = grpo.fit(addition_rows(), reward_fn="contains_answer", validation=addition_rows(8))
    assert len(losses(result)) == 2 and "val_accuracy" in result.metrics


def test_a_loaded_model_may_know_its_tokenizer(folder: Path):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    options = {**SMALL, "num_prompts_per_step": 2}
    result = nemorl.train(model=loaded, dataset=addition_rows(), reward_fn=digits, **options)
    assert result.metrics["num_tokens"] > 0


def test_a_trainer_is_made_as_in_trl(folder: Path, tmp_path: Path):
    trainer = nemorl.GRPOTrainer(
        model=folder, reward_funcs=digits, train_dataset=addition_rows(), **SMALL, **SIZES
    )
    result = trainer.train()
    assert losses(result) == losses(start(grpo_config(tmp_path / "other", steps=2)))
    assert repr(trainer).startswith("GRPOTrainer(") and "optimizer.lr=0.01" in repr(trainer)
    assert repr(result).startswith("TrainResult(step=2, reward=") and len(repr(result)) < 200
    assert "<td>path</td><td>runs/grpo</td>" in result._repr_html_()


def test_settings_of_answers_by_name(folder: Path):
    by_name = nemorl.generate(model=folder, prompt="1+1=", max_new_tokens=4, seed=0, device="cpu")
    limits = nemorl.GenerationConfig(max_new_tokens=4)
    by_section = nemorl.generate(folder, ["1+1="], generation=limits, seed=0, trainer__device="cpu")
    assert by_name == by_section and len(by_name) == 1


@pytest.mark.parametrize("cls", [nemorl.GRPOConfig, nemorl.SFTConfig, nemorl.DPOConfig])
def test_every_setting_has_its_names(cls: type[Any], monkeypatch: pytest.MonkeyPatch):
    """By section and name always, alone where that is unique; each section whole."""
    monkeypatch.setattr(api, "leaves", cache(leaves))
    command, own = command_of(cls), leaves(cls)
    fields = {key_of(field.name): field.name for field in dataclasses.fields(cls)}
    for key in own:
        section, _, last = key.rpartition(".")
        names = {last} if keys_named(last, own) == [key] else set[str]()
        names |= {f"{each}__{last}" for each in (section, fields.get(section)) if each}
        for name in names:
            expected = (section, {last: 7}) if section else (last, 7)
            assert _nested(cls, command, name, 7) == expected, name
    for key, field in fields.items():
        value = getattr(cls(), field)
        tree = to_dict(value) if dataclasses.is_dataclass(value) else value
        for name, each in product((key, field), (value, tree)):
            assert _nested(cls, command, name, each) == (key, tree)
            assert make_config(command, **{name: each}) == cls()


def trainer(**arguments: Any) -> nemorl.GRPOTrainer:
    return nemorl.GRPOTrainer("model", **arguments)


REFUSED: dict[str, Callable[[], Any]] = {
    r"unknown setting lrr of grpo; did you mean lr\?": lambda: make_config("grpo", lrr=1),
    r"optimizer__lrr of grpo; did you mean optimizer__lr\?": lambda: make_config(
        "grpo", optimizer__lrr=1
    ),
    "optimizer__lr must be given once": lambda: make_config("grpo", lr=1e-3, optimizer__lr=1e-4),
    "unknown key loss.token_gradient: another loss.name has it; keys of": lambda: make_config(
        "grpo", token_gradient=True
    ),
    "async.max_staleness must be at least 0, but it is -1": lambda: make_config(
        "grpo", async_={"max_staleness": -1}
    ),
    r"unknown setting async__stale of grpo": lambda: make_config("grpo", async__stale=1),
    "several sections: write trainer__backend or generation__backend": lambda: make_config(
        "grpo", backend="torch"
    ),
    "loss must be a name, but it is a function: decorate": lambda: make_config("grpo", loss=digits),
    r"reward must be given once, .*: reward and reward_fn": lambda: nemorl.train(
        model="m", dataset=[{"prompt": "1+1="}], reward=digits, reward_fn=digits
    ),
    r"args must be a nemorl.GRPOConfig, but .* settings by name": lambda: trainer(args=object()),
    "TRL's learning_rate is optimizer.lr; write": lambda: trainer(learning_rate=1e-5),
    "model must be given, but it is None: name a folder, or": lambda: nemorl.GRPOTrainer(),
    r"trainer\.sequence_packing is not used by this command": lambda: nemorl.evaluate(
        "m", "rows.jsonl", trainer={"sequence_packing": True}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()

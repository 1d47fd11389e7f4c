"""`nemorl.train` and the trainers: what they accept, and that they are `nemorl.run` under another
name.
"""

from pathlib import Path

import pytest
import torch

import nemorl
from nemorl.runtime.cli.api import make_config
from tests.runtime.runs import addition_rows, digits, grpo_config, of_phase, sft_config, start
from tests.tiny_models import tiny_model, tiny_tokenizer

QUIET = {
    "run": {"display": "none", "plots": False, "export": False},
    "device": "cpu",
    "max_total_sequence_length": 32,
    "max_new_tokens": 4,
}
SMALL = {**QUIET, "lr": 1e-2, "max_num_steps": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_model(scale=2.0).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def losses(result: nemorl.TrainResult) -> list[float]:
    return [line["loss"] for line in of_phase(result, "train")]


def test_train_is_run(folder: Path, tmp_path: Path):
    sizes = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4}
    result = nemorl.train(model=folder, dataset=addition_rows(), reward_fn=digits, **SMALL, **sizes)
    assert result.paths.path == Path("runs/grpo") and result.paths.metrics.exists()
    assert losses(result) == losses(start(grpo_config(tmp_path / "other", steps=2)))
    again = nemorl.train(
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        dataset=addition_rows(),
        reward_fn=digits,
        **SMALL,
        **sizes,
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
    seen = []

    class Look(nemorl.Callback):
        def on_step_end(self, trainer, step, metrics) -> None:
            seen.append(step)

    result = grpo.fit(
        addition_rows(),
        reward_fn="contains_answer",
        validation=addition_rows(8),
        callbacks=[Look()],
    )
    assert seen == [1, 2] and "val_accuracy" in result.metrics


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lrr": 1}, r"unknown setting lrr of grpo; did you mean lr\?"),
        (
            {"optimizer__lrr": 1},
            r"unknown setting optimizer__lrr of grpo; did you mean optimizer__lr\?",
        ),
        ({"zzz": 1}, "unknown setting zzz of grpo; nemorl grpo --help lists them"),
        ({"lr": "fast"}, r"optimizer\.lr must be a valid number, but it is 'fast'"),
        ({"optimizer": {"lrr": 1}}, r"unknown key optimizer\.lrr; did you mean optimizer\.lr\?"),
        ({"clip_high": 0.3, "loss": "reinforce"}, "unknown key loss.clip_high"),
        ({"lr": 1e-3, "optimizer__lr": 1e-4}, "optimizer__lr must be given once"),
        (
            {"backend": "torch"},
            "in several sections: write trainer__backend or generation__backend",
        ),
        ({"preset": "dappo"}, r"unknown preset 'dappo'; did you mean dapo\?"),
        ({"loss": digits}, "loss must be a name, but it is a function: decorate it with @nemorl"),
    ],
)
def test_overrides_that_can_not_be(overrides: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_config("grpo", **overrides)


def test_overrides():
    config = make_config(
        "grpo",
        lr=1e-4,
        loss={"name": "gspo", "clip_low": 0.1},
        data=nemorl.DataConfig(prompt_column="q"),
        run__dir=Path("there"),
        stop_strings=("\n",),
        reward=["exact_match", "contains_answer"],
        reward_weights=(1.0, 0.5),
    )
    assert (
        config.optimizer.lr,
        config.loss.clip_low,
        config.data.prompt_column,
        config.run.dir,
    ) == (1e-4, 0.1, "q", "there")
    assert (config.generation.stop_strings, config.reward, config.reward_weights) == (
        ("\n",),
        ("exact_match", "contains_answer"),
        (1.0, 0.5),
    )
    assert make_config("sft", num_epochs=3) == nemorl.SFTConfig(num_epochs=3)
    with pytest.raises(ValueError, match=r"TRL's learning_rate is optimizer\.lr here"):
        make_config("grpo", learning_rate=1e-4)
    with pytest.raises(ValueError, match="preset is for grpo"):
        make_config("sft", preset="dapo")
    with pytest.raises(
        ValueError,
        match=r"unknown algorithm 'gpro'; did you mean grpo\? Valid names: sft, grpo, dpo",
    ):
        make_config("gpro")


def test_a_loaded_model_may_know_its_tokenizer(folder: Path):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        nemorl.train(
            model=loaded, dataset=addition_rows(), reward_fn=digits, **SMALL, num_prompts_per_step=2
        ).metrics["num_tokens"]
        > 0
    )

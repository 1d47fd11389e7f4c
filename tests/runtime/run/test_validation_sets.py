"""Known data sets in training, and validation on several sets, by name."""

import datasets
import pytest
import yaml

import nemorl
from nemorl.runtime.run.data import reward_for
from tests.data.known_samples import hub
from tests.runtime.runs import TRAINER, addition_rows, of_phase
from tests.tiny_models import tiny_model, tiny_tokenizer


def train(folder, algorithm: str = "grpo", **options):
    usual = {
        "tokenizer": tiny_tokenizer(),
        "trainer": TRAINER,
        "run": {"dir": str(folder / "run"), "plots": False},
        "generation": {"max_new_tokens": 4},
        "max_num_steps": 1,
        "algorithm": algorithm,
    }
    if algorithm == "grpo":
        usual |= {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    return nemorl.train(tiny_model(), **(usual | options))


def saved(folder):
    return yaml.safe_load((folder / "run" / "config.yaml").read_text())


def test_a_known_set_needs_no_settings_in_training(tmp_path, monkeypatch, capsys):
    hub(tmp_path, monkeypatch)
    result = train(tmp_path, dataset="openai/gsm8k", validation="openai/gsm8k")
    assert saved(tmp_path)["reward"] == "last_number"
    assert "val_accuracy" in result.metrics and "val_gsm8k/accuracy" not in result.metrics
    lines = [line for line in capsys.readouterr().err.splitlines() if "is known; where" in line]
    assert len(lines) == 1 and "reward 'last_number'" in lines[0]


def test_a_reward_that_is_given_judges_known_sets(tmp_path, monkeypatch, capsys):
    hub(tmp_path, monkeypatch)
    train(tmp_path, dataset="openai/gsm8k", reward="contains_answer")
    assert saved(tmp_path)["reward"] == "contains_answer"
    quiet = {"dir": str(tmp_path / "quiet"), "plots": False, "display": "none"}
    capsys.readouterr()
    result = train(tmp_path, dataset="openai/gsm8k", reward=lambda response: 0.5, run=quiet)
    assert result.metrics["reward"] == 0.5 and "is known; where" not in capsys.readouterr().err


def test_sft_judges_the_answers_to_known_validation_rows(tmp_path, monkeypatch):
    hub(tmp_path, monkeypatch)
    options = {"train_global_batch_size": 2, "reduction": "token_mean"}
    result = train(tmp_path, "sft", dataset="openai/gsm8k", data={"held_out": 2}, **options)
    assert saved(tmp_path)["reward"] == "last_number" and "val_accuracy" in result.metrics


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (("openai/gsm8k:socratic", "openai/gsm8k"), "last_number"),
        ((["math-ai/aime25", "HuggingFaceH4/MATH-500"], None), "math"),
        (("HuggingFaceH4/ultrafeedback_binarized", None), "exact_match"),
        (("openai/gsm8k", "cais/mmlu"), None),
    ],
)
def test_the_reward_of_known_sets(sources, expected):
    assert reward_for("think_format", *sources) == "think_format"
    if expected is not None:
        assert reward_for("exact_match", *sources) == expected
        return
    with pytest.raises(ValueError, match=r"reward must be given .*last_number.*: add --reward"):
        reward_for("exact_match", *sources)


def test_validation_sets_by_name(tmp_path):
    rows = addition_rows()
    names = []
    for name, part in (("easy", rows[:4]), ("hard", rows[4:10])):
        names.append(str(tmp_path / f"{name}.jsonl"))
        datasets.Dataset.from_list(part).to_json(names[-1])
    run = {"dir": str(tmp_path / "run"), "plots": False, "max_val_samples": 4}
    data = {"validation": names}
    result = train(tmp_path, dataset=rows, data=data, reward="contains_answer", run=run)
    (line,) = of_phase(result, "validation")
    both = (line["easy/accuracy"] + line["hard/accuracy"]) / 2
    assert line["accuracy"] == pytest.approx(both)  # as many rows of each are used
    assert {"easy/reward", "hard/reward"} <= line.keys()
    assert "val_hard/accuracy" in result.metrics

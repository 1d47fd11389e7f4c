"""Several rewards in whole runs: in Python, in a configuration and on the command line; what is
logged of each.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.evaluation import comparison
from nemorl.runtime.cli.main import main
from nemorl.runtime.store.directory import read_lines
from tests.runtime.runs import (
    addition_rows,
    digits,
    grpo_config,
    rows_file,
    samples_at,
    saved_model,
    sft_config,
    start,
)


def lengths(prompts, responses):
    return [len(response) / 4 for response in responses]


def plain(prompt, response) -> float:
    return 0.5


def plain_one(prompt, response) -> float:
    return 1.0


def graded(prompt, response, grade) -> float:
    return grade


class Begun(nemorl.Callback):
    """Notes that training has begun."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def on_train_begin(self, trainer) -> None:
        self.seen.append("begun")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model and rows on disk, for the command line."""
    folder = tmp_path_factory.mktemp("saved")
    rows = rows_file(folder / "rows.jsonl", addition_rows(12))
    return {"model": str(saved_model(folder / "model")), "rows": rows}


def test_each_of_several_rewards_is_logged(tmp_path: Path):
    config = grpo_config(tmp_path, steps=2, run={"val_period": 1}, reward_weights=(1.0, -0.5, 0.0))
    result = start(
        config,
        reward=[digits, FunctionalRewardWrapper(lengths, name="long"), plain],
        validation=addition_rows(4),
    )
    assert {line["phase"] for line in result.history} == {"train", "validation"}
    for line in result.history:
        assert line["reward"] == pytest.approx(
            line["reward/digits"] - 0.5 * line["reward/long"], abs=1e-6
        )
        assert line["reward/plain"] == 0.5
    assert {"reward/digits", "val_reward/long"} <= set(result.metrics)
    for sample in samples_at(tmp_path, 1):
        each = sample["rewards"]
        assert list(each) == ["digits", "long", "plain"]
        assert each["digits"] == pytest.approx(digits("", sample["response"]))
        assert sample["reward"] == pytest.approx(each["digits"] - 0.5 * each["long"], abs=1e-6)


@pytest.mark.parametrize(
    ("names", "accuracy"),
    [(("form", "accuracy_reward"), 0), (("form", "right"), None), (("form",), 1)],
)
def test_accuracy_is_the_share_of_the_reward_that_is_named_so(names, accuracy, saved):
    """TRL's order has the format first, and each reward's mean is beside it."""
    rewards = zip(names, (plain_one, plain), strict=False)
    both = [FunctionalRewardWrapper(fn, name=name) for name, fn in rewards]
    options: Any = {"device": "cpu", "temperature": 1.0, "max_new_tokens": 2, "max_rows": 2, "n": 2}
    result = nemorl.evaluate(saved["model"], saved["rows"], both, **options)
    assert result.get("accuracy") == result["summaries"][0].get("pass@2") == accuracy
    assert result["reward"] >= 1
    assert all(("correct" in answer) == (accuracy is not None) for answer in result["answers"])
    twice = comparison(result["answers"], result["answers"])
    assert ("accuracy" in {line["metric"] for line in twice}) == (accuracy is not None)


def test_what_an_environment_took_for_the_answer_is_in_the_samples(tmp_path: Path):
    class FirstCharacter(FunctionalRewardWrapper):
        def step(self, message_log_batch, metadata):
            return replace(
                super().step(message_log_batch, metadata),
                answers=[log[-1]["content"][:1] for log in message_log_batch],
            )

    for reward in (FirstCharacter(digits), [plain, FirstCharacter(digits)]):
        folder = tmp_path / type(reward).__name__
        start(grpo_config(folder, steps=1), reward=reward)
        samples = samples_at(folder, 1)
        assert samples
        assert all(sample["extracted_answer"] == sample["response"][:1] for sample in samples)


def test_sft_validates_with_several_rewards(tmp_path: Path):
    config = sft_config(tmp_path, steps=1, reward=("exact_match", "contains_answer"))
    result = start(config, validation=addition_rows(4))
    assert result.metrics["val_reward"] == pytest.approx(
        result.metrics["val_reward/exact_match"] + result.metrics["val_reward/contains_answer"]
    )
    assert "val_accuracy" not in result.metrics


def test_what_validation_needs_is_checked_before_training(tmp_path: Path):
    config = sft_config(tmp_path / "sft", reward="tests.runtime.algorithms.test_rewards:graded")
    seen = []
    with pytest.raises(
        ValueError, match="reward 'graded' wants the column 'grade', but row 1 has only"
    ):
        start(config, validation=addition_rows(2), callbacks=[Begun(seen)])
    assert not seen


def test_evaluation_with_several_rewards(saved, tmp_path: Path, capsys):
    output, own = tmp_path / "answers.jsonl", "tests.runtime.algorithms.test_rewards:plain"
    command = (
        f"eval --model {saved['model']} --validation {saved['rows']} --device cpu"
        f" --output {output} --reward exact_match {own} --reward-weights 1 0.2 --max-new-tokens 4"
    )
    assert main(command.split()) == 0
    answers = read_lines(output)
    assert len(answers) == 12
    for answer in answers:
        assert answer["reward"] == pytest.approx(answer["rewards"]["exact_match"] + 0.1)
    shown = capsys.readouterr().out
    assert "reward/plain" in shown and "0.5000" in shown

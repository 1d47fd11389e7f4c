"""Two runs whose validations answered the same rows, compared by a paired test."""

import pytest

import nemorl
from nemorl.rollout.evaluation import paired
from nemorl.runtime.cli import main as cli
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.report import Gathered, paired_tests
from tests.runtime.runs import addition_rows, grpo_config, start
from tests.runtime.watch.report.pages import Page


def judged(
    folder, rewards, *, step: int = 4, data="sums", first: int = 0, texts: int = 10
) -> RunDirectory:
    directory = RunDirectory.create(folder, "")
    directory.append_metrics(step, {"reward": 0.5})
    for n, reward in enumerate(rewards):
        if reward is not None:
            asked = {"data": data, "group": first + n, "prompt": f"{n % texts}="}
            verdict = {"reward": reward, "correct": reward >= 1}
            directory.append_outcomes(step, [asked | verdict])
    return directory


def lines_of(*directories: RunDirectory):
    return paired_tests([Gathered(directory.path) for directory in directories])


def test_a_validation_is_recorded_row_by_row(tmp_path, capsys):
    config = grpo_config(tmp_path / "run", steps=4, run={"val_period": 2, "samples_per_step": 1})
    result = start(config, validation=addition_rows(8))
    directory = RunDirectory.open(tmp_path / "run")
    assert list(directory.outcome_files()) == [2, 4]
    outcomes = Gathered(directory.path).outcomes
    assert len(outcomes) == 8, "all, and not only samples"
    (*_, line) = [line for line in result.history if line["phase"] == "validation"]
    mean = sum(outcome["reward"] for outcome in outcomes) / 8
    assert line["reward"] == pytest.approx(mean)
    directory.truncate(2)
    assert list(directory.outcome_files()) == [2], "a resumed run validates again"
    both = [str(tmp_path / "run" / "validation" / "step_2.jsonl")] * 2
    assert cli.main(["compare", *both]) == 0
    assert "accuracy        8 " in capsys.readouterr().out


def test_the_report_tests_whether_two_runs_differ(tmp_path):
    rewards = [0, 0, 0, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0, 1, 1]
    runs = [judged(tmp_path / name, each) for name, each in zip("ab", rewards, strict=True)]
    (line,) = lines_of(*runs)
    (difference, half), p_value = paired(*rewards)
    found = line["difference"], line["difference_ci"], line["p_value"]
    assert found == (difference, half, p_value)
    assert (line["run"], line["num_prompts"], line["first"], line["second"]) == ("b", 10, 0.3, 0.9)
    page = Page(nemorl.write_report([run.path for run in runs]).read_text())
    section = page.text.split("Do they differ?")[1].split("Curves")[0]
    assert f"baccuracy100.30.9+0.6 ± {half:.3f}{p_value:.4f}".rstrip("0") in section.replace(
        "all", ""
    )
    alone = Page(nemorl.write_report(runs[0].path).read_text())
    assert "Do they differ?" not in alone.text


def test_only_rows_that_both_answered_are_compared(tmp_path):
    runs = judged(tmp_path / "a", [0, None, 1, 0]), judged(tmp_path / "b", [1, 1, None, 0], step=9)
    (line,) = lines_of(*runs)
    assert (line["num_prompts"], line["difference"]) == (2, 0.5)
    assert lines_of(runs[0], judged(tmp_path / "c", [1, 1], data="others")) == []
    beside_others = judged(tmp_path / "d", [1, 1, 1, 1, 0], first=7, texts=4)
    (line,) = lines_of(runs[0], beside_others)
    assert (line["num_prompts"], line["difference"]) == (3, pytest.approx(2 / 3))
    newest = judged(tmp_path / "e", [1, 1, 1, 1], step=10)
    older = judged(tmp_path / "f", [0, 0, 0, 0], step=2).outcome_files()[2]
    older.rename(newest.path / "validation" / "step_2.jsonl")
    assert lines_of(runs[0], newest)[0]["second"] == 1.0, "the last validation counts"

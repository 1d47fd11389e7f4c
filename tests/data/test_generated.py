"""Tasks of reasoning-gym as rows, and their own scores as rewards."""

import sys

import pytest

from nemorl.data.datasets import load_rows
from nemorl.data.sources import has_splits, task_of
from tests.data.known_samples import judged

TASK = "reasoning_gym:basic_arithmetic"
SMALL = f"{TASK}?size=20&max_terms=2&max_digits=2&operators=[-]"


def test_rows_of_a_task():
    rows = load_rows(TASK, split="train")
    assert len(rows) == 1000 and has_splits(TASK)
    assert rows[0].keys() >= {"prompt", "answer", "metadata", "task"}
    assert rows[6].origin == f"{TASK}, row 7"
    assert [row["prompt"] for row in rows] == [r["prompt"] for r in load_rows(TASK, split="train")]
    own = task_of("basic_arithmetic", seed=0, size=3)
    assert [row["prompt"] for row in rows[:3]] == [own[number]["question"] for number in range(3)]


def test_settings_are_the_tasks_own():
    rows = load_rows(SMALL, split="train")
    assert len(rows) == 20
    for row in rows:
        assert row["metadata"]["num_terms"] == 2 and "-" in row["prompt"]
    other = load_rows(SMALL + "&seed=1", split="train")
    assert [row["prompt"] for row in other[:19]] == [row["prompt"] for row in rows[1:]]


def test_validation_is_of_other_seeds():
    rows, others = (load_rows(SMALL, split=split) for split in ("train", "validation"))
    indices = [{row["metadata"]["source_index"] for row in each} for each in (rows, others)]
    assert len(others) == 20 and indices[0] == indices[1]
    shared = {row["prompt"] for row in rows} & {row["prompt"] for row in others}
    assert len(shared) < 5


@pytest.mark.slow_cases("arc_agi")
@pytest.mark.parametrize("name", ["basic_arithmetic", "graph_color", "leg_counting", "arc_agi"])
def test_a_tasks_own_score_is_the_reward(name):
    rows = load_rows(f"reasoning_gym:{name}?size=3", split="train")
    task = task_of(name)
    for row in rows:
        responses = ["It is <answer>7</answer>, no: <answer>\n8 </answer>!", " 9\n"]
        said = ["8", "9"]
        if row["answer"] is not None:
            responses += [f"<answer>{row['answer']}</answer>", str(row["answer"])]
            said += [row["answer"]] * 2
        entry = {name: row[name] for name in ("answer", "metadata")}
        expected = [task.score_answer(answer=text, entry=entry) for text in said]
        assert judged("reasoning_gym", [row] * len(said), responses) == pytest.approx(expected)
        assert expected[2:] == [1.0] * len(expected[2:])


def test_settings_count_where_a_task_scores_by_them():
    """An error in the last place that a task allows is forgiven."""
    source = "reasoning_gym:decimal_arithmetic?size=1&max_num_decimal_places=3"
    (row,) = load_rows(source, split="train")
    near = str(float(row["answer"]) + 0.0004)
    strict = row.but(task="decimal_arithmetic?max_num_decimal_places=6")
    coarse, fine = judged("reasoning_gym", [row, strict], [near, near])
    assert coarse == 1.0 > fine


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:basic_aritmetic", "'basic_aritmetic'.*did you mean basic_arithmetic"),
        (f"{TASK}?terms=2", "unexpected keyword argument 'terms': change the setting"),
    ],
)
def test_wrong_names(source, message):
    with pytest.raises(ValueError, match=message):
        load_rows(source, split="train")


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"needs reasoning-gym.*: pip install reasoning-gym"):
        load_rows(TASK, split="train")

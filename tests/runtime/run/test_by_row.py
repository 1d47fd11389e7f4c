"""Runs whose rows choose their environment and reward by name."""

from pathlib import Path

import pytest

import nemorl
from nemorl.runtime.config.tree import load_config
from nemorl.runtime.watch.report import write_report
from tests.rollout.counting import Count
from tests.runtime.runs import (
    addition_rows,
    ahead,
    digits,
    grpo_config,
    numbers,
    of_phase,
    prove,
    resumed,
    rows_file,
    samples_at,
    saved_model,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

REWARD = {"digits": digits, "sums": ["contains_answer", "last_number"]}
NAMES = ["digits", "count", "sums", "digits"]


def mixed(count: int = 12) -> list[dict]:
    return [{**row, "environment": NAMES[i % 4]} for i, row in enumerate(addition_rows(count))]


def run(config, **options):
    given = {"train": mixed(), "reward": REWARD, "environment": {"count": Count}, **options}
    return nemorl.run(config, model=tiny_model(scale=2.0), tokenizer=tiny_tokenizer(), **given)


def test_a_mixed_run_logs_each_by_its_name(tmp_path: Path):
    rollout, every = nemorl.RolloutConfig(discount=0.5), {"samples_per_step": 24}
    few = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
    config = grpo_config(tmp_path, steps=1, run=every, rollout=rollout, **few)
    result = run(config, validation=mixed(4))
    assert {line["phase"] for line in result.history} == {"train", "validation"}
    for line in result.history:
        each = {name: line[f"{name}/reward"] for name in (*REWARD, "count")}
        assert line["sums/reward"] == pytest.approx(
            line["sums/reward/contains_answer"] + line["sums/reward/last_number"]
        )
        assert "digits/accuracy" in line and "digits/reward/last_number" not in line
        assert each["count"] == 1 + 0.5 * 2 + 0.25 * 3
        if line["phase"] == "validation":
            mean = (2 * each["digits"] + each["count"] + each["sums"]) / 4
            assert line["reward"] == pytest.approx(mean)
    for sample in samples_at(tmp_path, 1):
        name = sample["columns"]["environment"]
        assert len(sample.get("turns", [0])) == (3 if name == "count" else 1)
        assert ("rewards" in sample) == (name == "sums")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_mixed_run_resumes_and_is_reported(staleness: int, tmp_path: Path):
    options = {"run": {"save_period": 1}}
    whole = run(ahead(tmp_path / "whole", staleness, steps=4, **options))
    run(ahead(tmp_path / "half", staleness, steps=2, **options))
    again = run(resumed(ahead(tmp_path / "half", staleness, steps=4, **options)))
    if not staleness:
        last = [numbers(of_phase(each, "train")[-1]) for each in (again, whole)]
        assert last[0] == last[1]
    prove(tmp_path / "half", steps=4)
    page = write_report([tmp_path / "whole"], tmp_path / "page.html").read_text()
    assert "Reward, count" in page and "last number, sums" in page


def test_sets_name_theirs_in_the_configuration(tmp_path: Path):
    names = tuple(rows_file(tmp_path / f"{name}.jsonl", addition_rows(4)) for name in ("a", "b"))
    data = {"train": names, "environments": ("exact", "share"), "held_out": 2.0}
    config = grpo_config(
        tmp_path / "run",
        steps=1,
        reward={"exact": "exact_match", "share": f"{__name__}:quarter"},
        data=nemorl.DataConfig(max_total_sequence_length=32, **data),
    )
    (line,) = of_phase(run(config, train=None, reward=None, environment=None), "train")
    assert line["share/reward"] == 0.25 and line["exact/accuracy"] == line["a/accuracy"]
    saved = load_config(nemorl.GRPOConfig, tmp_path / "run/config.yaml", trust_code=True)
    assert saved.reward == config.reward and saved.data == config.data


def quarter(response: str) -> float:
    return 0.25


def test_an_evaluation_has_a_line_for_each(tmp_path: Path):
    model = saved_model(tmp_path / "model")
    rows = [{**row, "kind": ("exact", "share")[i % 2]} for i, row in enumerate(addition_rows(4))]
    given = {"device": "cpu", "environment_column": "kind", "max_new_tokens": 2}
    reward = {"exact": "exact_match", "share": [quarter, "exact_match"], "not_here": quarter}
    result = nemorl.evaluate(model, rows, reward, **given)
    shown = {line["category"]: line["reward"] for line in result["summaries"]}
    assert {*shown} == {None, "exact", "share"} and result["reward/quarter"] == 0.25
    assert shown[None] == pytest.approx((shown["exact"] + shown["share"]) / 2)
    assert [len(each.get("rewards", ())) for each in result["answers"]] == [0, 2] * 2

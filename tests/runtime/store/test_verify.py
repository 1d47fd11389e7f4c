"""`nemorl verify`: groups, and receipts as recorded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.runtime.cli.main import main
from nemorl.runtime.store.verify import Receipt, verify_run
from nemorl.runtime.watch.report import Gathered, render
from tests.runtime.runs import grpo_config, start


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a filter."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    generation = nemorl.GenerationConfig(max_new_tokens=6, top_k=12)
    start(grpo_config(folder, steps=3, generation=generation, run={"save_period": 2}))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def of(run: Path) -> dict[str, Receipt]:
    return {each.name: each for each in verify_run(run)}


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_whole_run_holds(run: Path, capsys: pytest.CaptureFixture[str]):
    found = of(run)
    assert {name: each.holds for name, each in found.items()} == {
        **dict.fromkeys(("weights", "support", "mismatch")),
        **dict.fromkeys(("tokens", "staleness", "prompts"), True),
    }
    assert found["prompts"].found == "18 taken: 18 trained on, 0 open"
    assert found["weights"].found == "not recorded"
    assert found["support"].found.endswith("or more, in 3 steps")
    assert found["staleness"].found == "up to 0 steps, in 3 steps"
    assert main(["verify", str(run)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" holds ") == 3 and "does not hold" not in printed
    assert main(["verify", str(run), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Receipt(**line) for line in lines] == [*found.values()]
    section = render(Gathered(run)).partition('<section id="receipts">')[2].partition("</sec")[0]
    assert section.count("<td>holds</td>") == section.count("<td>–</td>") == 3


def unproved(run: Path) -> None:
    second = {"receipts/tokens": 0, "receipts/tokens_unproved": 96}
    rewrite(run / "metrics.jsonl", lambda line: line | (second if line["step"] == 2 else {}))


def stopped(run: Path) -> None:
    error = "ReceiptError: step 4: the receipt support does not hold: 0.8"
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "failed", "error": error}))


def warned(run: Path) -> None:
    message = "step 3: the receipt support does not hold: 0.8"
    rewrite(run / "log.jsonl", lambda line: line | {"event": "warning", "message": message})


def taken_out(run: Path) -> None:
    def without(line: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in line.items() if line["step"] > 1 or k != "receipts/tokens"}

    rewrite(run / "metrics.jsonl", without)


def retrained(run: Path, *trained: list[int]) -> None:
    steps = dict(enumerate(trained, start=1))
    rewrite(run / "groups.jsonl", lambda x: x | {"trained": steps.get(x["step"], x["trained"])})


MOVED = [*range(7)], [*range(7, 12)]
SWAPPED = [0, 6, 2, 3, 4, 5], [1, *range(7, 12)]


@pytest.mark.parametrize("name", ["metrics", "groups"])
def test_a_finished_run_whose_last_steps_are_cut(name: str, run: Path):
    file = run / f"{name}.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    failed = {each.name: each.found for each in verify_run(run) if each.holds is False}
    if name == "groups":
        assert failed == {"prompts": "groups.jsonl ends with step 2 of 3"}
    else:
        said = "not recorded in step 3, but in others"
        assert failed == dict.fromkeys(("tokens", "support", "mismatch", "staleness"), said)


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (unproved, "tokens", "not in step 2"),
        (stopped, "support", "ReceiptError: step 4: the receipt support does not hold: 0.8"),
        (warned, "support", "step 3: the receipt support does not hold: 0.8"),
        (taken_out, "tokens", "not recorded in step 1, but in others"),
        (MOVED, "prompts", "groups.jsonl has step 1 train on 7 groups, and metrics.jsonl 6"),
        (SWAPPED, "prompts", "group 1 is lost in step 1 (1 in all)"),
    ],
)
def test_what_a_run_said_of_itself(
    change: Any, name: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    change(run) if callable(change) else retrained(run, *change)
    assert [each for each in of(run).values() if each.holds is False] == [
        Receipt(name, False, said)
    ]
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr()
    assert "does not hold" in printed.out and printed.err == f"{name} of {run} does not hold\n"
    assert "<b>does not hold</b>" in render(Gathered(run))


@pytest.mark.parametrize(
    ("changed", "holds", "said"),
    [
        ({}, True, "5 taken: 3 trained on, 1 dropped as uninformative, 1 open"),
        ({"trained": [3, 0]}, False, "group 0 is doubled in step 2 (1 in all)"),
        ({"dropped": {}}, False, "group 2 is lost in step 2 (1 in all)"),
        ({"open": [6]}, False, "group 4 is lost in step 2 (2 in all)"),
        ({"step": 4, "open": [9]}, True, "4 taken: 2 trained on, 2 open"),  # it did not end
    ],
)
def test_each_group_is_trained_on_dropped_or_open(
    changed: dict[str, Any], holds: bool, said: str, run: Path
):
    first = {"step": 1, "trained": [0, 1], "dropped": {}, "open": [2, 3]}
    second = {"step": 2, "trained": [3], "dropped": {"uninformative": [2]}, "open": [4], **changed}
    torn = '{"step": 3, "trai'
    rewrite(run / "metrics.jsonl", lambda line: {**line, "groups_trained": None})
    (run / "groups.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n{torn}")
    assert of(run)["prompts"] == Receipt("prompts", holds, said)


def test_files_that_are_missing(run: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("run.json", "metrics.jsonl", "groups.jsonl"):
        (run / name).unlink()
    assert {each.found for each in verify_run(run)} == {"not recorded"}
    assert main(["verify", str(run)]) == 0
    assert main(["verify", str(run / "nowhere")]) == 2
    assert "run must be the folder of a run" in capsys.readouterr().err

"""Values of wrong types, in any field of any file of a run, are omitted from its report."""

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.record import RunRecord
from nemorl.runtime.watch.report import page
from nemorl.runtime.watch.report.gather import Gathered

WRONG = [None, True, -1, 10**400, 1e308, float("nan"), "text", [None], {"a": [1]}]
TOKEN = {"position": 0, "token": "2", "logprob": -1.0, "trainer_logprob": -3.0}
SAMPLE = {
    "group": 0,
    "prompt": "1+1=",
    "response": "2",
    "reward": 0.5,
    "rewards": {"brief": 0.5},
    "finish_reason": "stop",
    "token_ids": [4, 5],
    "pieces": ["2", "3"],
    "logprobs": [-1.0, -2.0],
    "trainer_logprobs": [-3.0, -2.0],
    "advantages": [0.5, 0.5],
    "worst_tokens": [TOKEN],
    "sampled": [True, False],
    "trained": [True, False],
    "turns": [
        {"given": "1+", "response": "2", "reward": 0.5, "rewritten": False, "tokens": [0, 1]}
    ],
    "failure": "KeyError: 'lost'",
    "cut_by": "rollout.max_turns",
    "columns": {"answer": "2"},
}
LENGTHS = {"count": 3, "total_tokens": 9, "mean": 3.0, "limit": 8, "histogram": [[1, 2], [4, 1]]}
EVENT = {
    "time": "2026-01-01T00:00:00",
    "level": "INFO",
    "step": 0,
    "event": "train_begin",
    "message": "begins",
    "defaults": {"optimizer.lr": 1e-6},
}
FILES: dict[str, Any] = {
    "metrics.jsonl": {
        **{"step": 1, "time": 1.5, "phase": "train", "reward": 0.5, "seconds": 0.1},
        **{"turns": 2.0, "failed_fraction": 0.5, "failed/KeyError": 1.0},
    },
    "samples/step_1.jsonl": SAMPLE,
    "validation/step_1.jsonl": {
        **{"data": "set_1", "group": 0, "prompt": "1+1=", "reward": 0.5, "correct": False}
    },
    "log.jsonl": EVENT,
    "run.json": None,
    "data.json": {"train": LENGTHS},
    "config.yaml": {"environment": {"torch": "2"}, "steps": 3, "optimizer": {"lr": 0.1}},
}


def with_wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield where `value` gets something wrong, in it or instead of it, and what that gives."""
    yield from (("", wrong) for wrong in WRONG)
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        for place, wrong in with_wrong(value[key]):
            changed = copy.copy(value)
            changed[key] = wrong
            yield f"{key}.{place}", changed


def a_run(path: Path) -> RunDirectory:
    """Write a run with something in each file."""
    directory = RunDirectory.create(path, "")
    directory.samples.mkdir()
    (path / "validation").mkdir()
    record = RunRecord.begin(directory, algorithm="sft")
    for name, value in FILES.items():
        value = value | {"run_id": record.run_id} if name == "log.jsonl" else value
        if value is not None:
            (path / name).write_text(json.dumps(value) + "\n")  # which is YAML, too
    return directory


@pytest.mark.parametrize("name", FILES)
def test_wrong_values_are_omitted(tmp_path: Path, monkeypatch, name: str):
    drawn: dict[str, Any] = {}  # each picture once, as drawing takes most of the time
    draw = page.svg
    monkeypatch.setattr(
        page, "svg", lambda *it: drawn.get(str(it)) or drawn.setdefault(str(it), draw(*it))
    )
    other, file = Gathered(a_run(tmp_path / "other").path), a_run(tmp_path / "run").path / name
    failed = []
    for place, wrong in with_wrong(yaml.safe_load(file.read_text())):
        file.write_text(json.dumps(wrong) + "\n")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                run = Gathered(tmp_path / "run")
                page.render(run)
                page.render(run, other)
            except Exception as error:
                failed.append(f"{place} of {wrong!s:.200}: {error!r:.200}")
    assert not failed, "\n".join(failed)

import json
import logging
import warnings
from datetime import datetime

import pytest

from nemorl.runtime.store.directory import RunDirectory, read_lines
from nemorl.runtime.watch.callbacks import notify
from nemorl.runtime.watch.log import event, recorded
from tests.runtime.runs import addition_rows, grpo_config, start
from tests.runtime.tiny import tiny_run


def log_of(directory: RunDirectory) -> list[dict]:
    return read_lines(directory.log)


def test_every_line_says_when_where_and_what(directory, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with recorded(directory, algorithm="grpo") as log:
        notify([log], "on_train_begin", tiny_run())
        notify([log], "on_step_begin", tiny_run(), 1)
        event("hello", "a step is on its way", number=1.5, path=directory.path)
        logging.getLogger("another.library").warning("careful: %s", "thin ice")
        logging.getLogger("another.library").info("not worth a line")
    lines = log_of(directory)
    assert all(line["run_id"] == log.record.run_id and line["rank"] == 3 for line in lines)
    assert all(datetime.fromisoformat(line["time"]).utcoffset() is not None for line in lines)
    assert [(line["event"], line["level"], line["step"]) for line in lines] == [
        ("run_begin", "INFO", 0),
        ("train_begin", "INFO", 0),
        ("hello", "INFO", 1),
        ("message", "WARNING", 1),
        ("run_finished", "INFO", 1),
    ]
    assert (lines[2]["number"], lines[2]["path"]) == (1.5, str(directory.path))
    assert (lines[3]["logger"], lines[3]["message"]) == ("another.library", "careful: thin ice")


def test_warnings_are_kept_and_still_seen(directory):
    with pytest.warns(UserWarning, match="is flat"), recorded(directory, algorithm="sft"):
        warnings.warn("the reward is flat", stacklevel=1)
    (line,) = [line for line in log_of(directory) if line["level"] == "WARNING"]
    told = line["event"], line["category"], line["message"]
    assert told == ("warning", "UserWarning", "the reward is flat")
    assert "test_log.py" in line["place"]


def test_nothing_is_left_behind(directory):
    def state():
        root, ours = logging.getLogger(), logging.getLogger("nemorl")
        return root.handlers[:], ours.level, warnings.showwarning

    before = state()
    with pytest.raises(RuntimeError), recorded(directory, algorithm="sft"):
        raise RuntimeError("over")
    assert state() == before


@pytest.mark.parametrize(
    ("error", "level", "status"),
    [(RuntimeError("no more"), "ERROR", "failed"), (KeyboardInterrupt(), "WARNING", "interrupted")],
)
def test_how_it_ended(directory, error, level, status):
    with pytest.raises(type(error)), recorded(directory, algorithm="sft"):
        raise error
    line = log_of(directory)[-1]
    assert (line["level"], line["event"]) == (level, f"run_{status}")
    assert "Traceback" in line["traceback"]
    assert json.loads(directory.record.read_text())["status"] == status


def test_a_log_that_can_not_be_written_ends_no_run(directory):
    directory.log.mkdir()
    with recorded(directory, algorithm="sft"):
        event("hello", "nobody will read this")
    assert json.loads(directory.record.read_text())["status"] == "finished"


def test_the_log_of_a_whole_run(tmp_path):
    start(
        grpo_config(tmp_path / "run", steps=3, run={"save_period": 2, "val_period": 3}),
        validation=addition_rows(4),
    )
    lines = log_of(RunDirectory(tmp_path / "run"))
    assert [(line["event"], line["step"]) for line in lines if line["level"] == "INFO"] == [
        ("run_begin", 0),
        ("train_begin", 0),
        ("checkpoint", 2),
        ("validation", 3),
        ("train_end", 3),
        ("checkpoint", 3),
        ("run_finished", 3),
    ]
    assert "accuracy" in next(line for line in lines if line["event"] == "validation")["metrics"]

import errno
import json
import math
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemorl.runtime.store import directory as run_directory
from nemorl.runtime.store.directory import RunDirectory, git_commit
from nemorl.runtime.store.export import replacing
from nemorl.runtime.store.files import NotWritten, write_atomically, writing


def test_config_comes_with_its_environment(directory):
    config = yaml.safe_load(directory.config.read_text())
    environment = config["environment"]
    assert config["max_num_steps"] == 7
    assert environment["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert environment.keys() >= {"python", "system", "nemorl", "transformers", "cpus", "memory"}


def test_commit_is_named_and_changes_are_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    (tmp_path / "file").write_text("one")
    for command in ("init -q", "add file", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *command.split()], check=True)
    commit = git_commit()
    assert commit is not None and len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert git_commit() == f"{commit} with changes"


def test_a_run_is_not_overwritten(directory):
    def steps() -> int:
        return yaml.safe_load(directory.config.read_text())["max_num_steps"]

    # A run that failed before it had any result may be started again.
    RunDirectory.create(directory.path, "max_num_steps: 8\n")
    directory.append_metrics(1, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"already holds one: resume it \(--run.resume\) or"):
        RunDirectory.create(directory.path, "")
    for resume in (True, "auto"):
        with pytest.raises(ValueError, match=r"run\.resume needs a checkpoint, but .* without one"):
            RunDirectory.create(directory.path, "", resume=resume)
    RunDirectory.create(directory.path, "max_num_steps: 9\n", restarted=True)
    (directory.checkpoints / "step_1").mkdir(parents=True)
    resumed = RunDirectory.create(directory.path, "max_num_steps: 9\n", resume=True)
    assert steps() == 8, "until it is clear that the run can go on"
    resumed.write_config("max_num_steps: 9\n")
    assert steps() == 9 and len(directory.read_metrics()) == 1


def test_metrics_are_lines_of_strict_json(directory):
    directory.append_metrics(1, {"loss": math.nan, "reward": 0.5, "steps": 3, "kl": math.inf})
    directory.append_metrics(1, {"accuracy": 0.25}, phase="validation")
    lines = directory.metrics.read_text().splitlines()
    train, validation = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    measured = {"loss": None, "reward": 0.5, "steps": 3, "kl": None}
    assert train == {"step": 1, "time": train["time"], "phase": "train", **measured}
    assert validation["phase"] == "validation" and validation["accuracy"] == 0.25


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-1, 20), st.text(max_size=30))
def test_truncate_keeps_exactly_what_was_before(steps, step, torn):
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        for number in steps:
            directory.append_metrics(number, {"loss": number / 7})
        lines = directory.metrics.read_text().splitlines(keepends=True) if steps else []
        kept = "".join(line for line in lines if json.loads(line)["step"] <= step)
        with directory.metrics.open("a") as file:  # killed while it wrote
            file.write('{"step": ' + torn.replace("\n", " ").replace("\r", " "))
        directory.truncate(step)
        assert directory.metrics.read_text() == kept, "bit for bit"


def test_samples_take_tensors_and_go_with_the_steps_after(directory):
    sample = {
        "tokens": torch.tensor([1, 2]),
        "logprobs": np.array([-0.5]),
        "advantages": (math.nan,),
    }
    for step in (1, 2, 10, 100, 101):
        directory.append_samples(step, [sample])
    written = {"tokens": [1, 2], "logprobs": [-0.5], "advantages": [None]}
    assert directory.read_samples([2, 3]) == {2: [written]}
    first, second = (directory.samples / f"steps_{name}.jsonl" for name in ("1-100", "101-200"))
    assert sorted(directory.samples.iterdir()) == [first, second]
    whole = first.read_text()
    with first.open("a") as file:  # killed while it wrote
        file.write('{"step": 101, "tok')
    directory.truncate(100)
    assert first.read_text() == whole and not second.exists()
    directory.truncate(2)
    assert first.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    directory.truncate(-1)
    assert list(directory.samples.iterdir()) == []


def test_half_a_character_in_a_sample_is_written(directory):
    directory.append_samples(1, [{"text": "half \ud800", "half \udc00": 1}])
    directory.append_samples(2, [{}])
    directory.truncate(1)
    (written,) = directory.read_samples([1])[1]
    assert written["text"] == "half \ud800" and written["half \udc00"] == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"step": "2", "time": 1.0, "phase": "train"}', "has a wrong step"),
        ('{"step": 2, "phase": "train"}', "has a wrong time"),
        ("[" * 10**5, "is not a JSON object"),
        ("\0\0\0\n[]", "is not a JSON object"),
        ('{"step": 2, "lo', "is not a JSON object"),  # torn, as by a kill
    ],
)
def test_a_damaged_line_is_left_out_with_a_warning_and_costs_no_later_one(directory, line, what):
    directory.append_metrics(1, {"loss": 1.0})
    with directory.metrics.open("a") as file:
        file.write(line)
    directory.append_metrics(2, {"loss": 2.0})
    with pytest.warns(UserWarning, match=rf"metrics.jsonl, line [23] {what}, and is omitted"):
        assert [line["step"] for line in directory.read_metrics()] == [1, 2]
    with pytest.warns(UserWarning, match=rf"line [23] {what}"):
        directory.truncate(1)
    assert [line["step"] for line in directory.read_metrics()] == [1]


def test_write_atomically_leaves_the_old_contents_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_atomically(file, "old")

    def broken(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(run_directory.os, "fsync", broken)
    with pytest.raises(OSError, match=r"disk full"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "file"), True),
        (Exception("No space left on device (os error 28)"), True),  # of a library in Rust
        (FileNotFoundError(errno.ENOENT, "No such file", "what was to be read"), False),
        (TypeError("of the code"), False),
    ],
)
def test_errors_of_writing_name_what_and_where(tmp_path, error, named):
    with pytest.raises(type(error) if not named else NotWritten) as caught, writing("it", tmp_path):
        raise error
    assert named or caught.value is error
    said = f"it could not be written to {tmp_path} ({error}; "
    assert str(caught.value).startswith(said) is named


def test_two_runs_at_once_get_two_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: RunDirectory.create_free("sft", tmp_path / "runs"), range(16))
        found = [directory.path for directory in made]
    assert sorted(path.name for path in found) == sorted(
        ["sft", *(f"sft-{number}" for number in range(2, 17))]
    )
    assert all(path.is_dir() for path in found)


def test_a_failed_export_leaves_nothing_but_the_earlier_one(tmp_path):
    with replacing(tmp_path / "hf") as folder:
        (folder / "weights").write_text("first")
    said = rf"the model could not be written to {tmp_path}/hf \(.*No space.*\): make room"
    with pytest.raises(OSError, match=said), replacing(tmp_path / "hf") as folder:
        (folder / "weights").write_text("sec")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "weights").read_text() == "first"

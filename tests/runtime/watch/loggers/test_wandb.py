"""Weights & Biases without a network: the real client offline, and what its files hold."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import closing
from nemorl.runtime.watch.loggers import LoggedRun, WandbLogger
from tests.runtime.runs import grpo_config, start
from tests.runtime.tiny import recorder, walk


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_PROJECT", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def written(file: Path) -> list[wandb_internal_pb2.Record]:
    """The records of a run that has ended.

    W&B's own process writes them, so that the last may take a moment.
    """
    for _ in range(100):
        records = [
            wandb_internal_pb2.Record.FromString(record) for record in records_of(file.read_bytes())
        ]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def records_of(data: bytes) -> Iterator[bytes]:
    """The whole records of a file: LevelDB's log after a header of 7 bytes, parts with checksum,
    length and kind, none across a block's end.
    """
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        part = data[place + 7 : place + 7 + length]
        if len(part) < length:
            return
        record += part
        place += 7 + length
        if kind in (1, 4):  # whole, last
            yield record
            record = b""


def history(records) -> list[dict]:
    def name(item) -> str:
        return item.key or "/".join(item.nested_key)

    return [
        {name(item): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]


@pytest.mark.slow
def test_a_run_offline(tmp_path):
    options = {"loggers": ("wandb",), "project": "arithmetic"}
    start(grpo_config(tmp_path / "sums", steps=2, run=options))
    (file,) = tmp_path.glob("sums/wandb/offline-run-*/run-*.wandb")
    records = written(file)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("arithmetic", "sums")
    assert run.run_id == json.loads((tmp_path / "sums" / "run.json").read_text())["run_id"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["max_num_steps"] == 2 and config["optimizer"]["lr"] == 1e-2
    lines = history(records)
    assert [line["step"] for line in lines if "train/reward" in line] == [1, 2]
    tables = [line["step"] for line in lines if "samples" in " ".join(line)]
    assert tables == [1], "one table a minute"
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id_and_an_error_is_told(directory):
    for steps, end in ((range(1, 4), False), (range(2, 5), True)):
        time.sleep(1.1)  # offline W&B names its folders by the second
        callback = recorder(directory, wandb=WandbLogger)
        with closing([callback]):
            walk(callback, steps, end=end)
    runs = {}
    for file in directory.path.glob("wandb/offline-run-*/run-*.wandb"):
        records = written(file)
        (run,) = [record.run for record in records if record.HasField("run")]
        (code,) = [record.exit.exit_code for record in records if record.HasField("exit")]
        steps = [line["step"] for line in history(records) if "train/loss" in line]
        runs[code] = run.run_id, run.project, steps
    assert runs == {1: ("3f9a01bc", "nemorl", [1, 2, 3]), 0: ("3f9a01bc", "nemorl", [2, 3, 4])}


def logged(tmp_path) -> LoggedRun:
    directory = RunDirectory.create(tmp_path / "run", "")
    return LoggedRun(directory=directory, run_id="3f9a01bd")


def test_a_service_that_refuses_is_explained(tmp_path, monkeypatch):
    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    told = r"run\.loggers names wandb, but.*No API key.*wandb login.*WANDB_MODE=offline"
    with pytest.raises(ValueError, match=told):
        WandbLogger(logged(tmp_path))

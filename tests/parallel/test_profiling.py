"""Traces of training steps: whole files only, and no crash however the run ends."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemorl.parallel.config import ProfileConfig
from nemorl.parallel.measure import close_profile, profile_folder, profiled


@pytest.fixture(autouse=True)
def closed():
    yield
    close_profile()


def train(config: ProfileConfig, steps: range, rank: int = 0) -> None:
    for step in steps:
        with profiled(config, step=step, rank=rank):
            torch.ones(4, 4) @ torch.ones(4, 4)


def in_a_process(folder: Path, then: str) -> int:
    config = f"ProfileConfig(steps='1:9', dir={str(folder)!r})"
    code = f"from tests.parallel.test_profiling import *; train({config}, range(1, 3)); {then}"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


def traces(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in folder.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert any(event["name"] == "aten::mm" for event in events)
        names = dict.fromkeys(
            event["name"] for event in events if event.get("name", "").startswith("optimizer step")
        )
        found[path.name] = sorted(name.split()[-1] for name in names)
    return found


def test_the_steps_asked_for_and_no_others(tmp_path):
    train(ProfileConfig(steps="2:3", dir=str(tmp_path)), range(1, 5))
    assert traces(tmp_path) == {"rank0_steps2-3.json": ["2", "3"]}


def test_a_model_that_is_not_profiled_leaves_the_recording_whole(tmp_path):
    config, other = ProfileConfig(steps="1:3", dir=str(tmp_path)), ProfileConfig()
    for step in range(1, 5):
        train(config, range(step, step + 1))
        train(other, range(step, step + 1))
        close_profile(other)
    assert traces(tmp_path) == {"rank0_steps1-3.json": ["1", "2", "3"]}


def test_a_run_that_ends_earlier_keeps_what_there_is(tmp_path):
    config = ProfileConfig(steps="2:9", dir=str(tmp_path))
    train(config, range(1, 3))
    with pytest.raises(KeyboardInterrupt), profiled(config, step=3, rank=0):
        torch.ones(4, 4) @ torch.ones(4, 4)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    close_profile()
    close_profile()
    assert traces(tmp_path) == {"rank0_steps2-3.json": ["2", "3"]}


def in_a_thread(function: Callable, *args: object) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["in_a_thread(close_profile)", "pass"])
def test_any_thread_or_the_end_of_the_process_may_end_it(tmp_path, then):
    assert in_a_process(tmp_path, then) == 0
    assert traces(tmp_path) == {"rank0_steps1-2.json": ["1", "2"]}


def test_a_folder_that_can_not_be_is_refused_early(tmp_path):
    (tmp_path / "file").touch()
    message = r"profile\.dir must be a folder that can be written to, but .*file/traces can't"
    with pytest.raises(ValueError, match=message):
        profile_folder(ProfileConfig(steps="1", dir=str(tmp_path / "file" / "traces")))
    folder = tmp_path / "a" / "b"
    assert profile_folder(ProfileConfig(steps="1", dir=str(folder))) == folder
    assert not list(folder.iterdir())

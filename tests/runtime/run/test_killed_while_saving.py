"""A run that saves in the background after each step loses a process at whatever moment: there is a
whole checkpoint, and the run goes on from it.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemorl.runtime.cli import main as cli
from nemorl.runtime.store import checkpoint
from tests.runtime.runs import TIMES, addition_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]
STEPS = 5
TIMES_KILLED = int(os.environ.get("NEMORL_TIMES_KILLED", "1"))
"""How often each kind of process is killed; many times more tell more about moments."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes some time to be written, and a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_model(scale=2.0, hidden_size=256, intermediate_size=1024).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in addition_rows()))
    assert cli.main(arguments(folder, folder / "straight")) == 0
    return folder


def arguments(place: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("sft", "--model.path", str(place / "model"), "--data.train", str(place / "rows.jsonl")),
        *("--run.dir", str(folder), "--run.async-save", "--run.save-period", "1"),
        *("--max-num-steps", str(STEPS), "--train-global-batch-size", "8"),
        *("--trainer.device", "cpu", "--run.display", "none", "--run.loggers", "--run.no-plots"),
        *("--run.no-export", "--data.max-total-sequence-length", "32", *more),
    ]


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def start(forked: Path, place: Path, folder: Path, *more: str) -> subprocess.Popen:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = (place / "log.txt").open("a")
    return subprocess.Popen(
        [forked / "nemorl", *arguments(place, folder, *more)],
        env=variables,
        stdout=log,
        stderr=log,
    )


def ranks_of(folder: Path) -> list[psutil.Process]:
    return [
        psutil.Process(int(re.search(r"process (\d+)", log.read_text())[1]))
        for log in (folder / "logs").iterdir()
    ]


def kill_at_some_moment(run: subprocess.Popen, folder: Path, who: str, delay: float) -> None:
    """Once there is a first checkpoint, and `delay` seconds more are over."""
    while not (folder / "checkpoints" / "latest").exists():
        assert run.poll() is None, "it ended by itself"
        time.sleep(0.005)
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    time.sleep(delay)
    for pid in {
        "driver": [run.pid],
        "rank": [random.choice(ranks).pid],
        "everyone": [run.pid, *(rank.pid for rank in ranks)],
    }[who]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it was through already
            assert who == "everyone" or run.wait(120) == 0
    run.wait(120)
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["everyone", "driver", "rank"])
def test_killed_at_any_moment(forked: Path, place: Path, tmp_path: Path, who: str):
    for attempt in range(TIMES_KILLED):
        folder = tmp_path / str(attempt)
        delay = random.random()
        run = start(forked, place, folder, "--parallel.dp-shard", "2")
        kill_at_some_moment(run, folder, who, delay)
        told = (
            f"{who} killed {delay:.3f} s after the first checkpoint;"
            f" {sorted(path.name for path in (folder / 'checkpoints').iterdir())}"
        )
        found = checkpoint.latest(folder)
        assert found is not None, told
        checkpoint.verify(found)
        assert cli.main(arguments(place, folder, "--run.resume")) == 0, (
            told
        )  # in one process, without ranks
        ours, expected = metrics(folder), metrics(place / "straight")
        assert len(ours) == len(expected) == STEPS, told
        for line, other in zip(ours, expected, strict=True):
            assert line.pop("phase") == other.pop("phase") == "train"
            assert line == pytest.approx(other, rel=1e-4, abs=1e-5), told
        assert not list((folder / "checkpoints").glob(".tmp*")), told


def test_saving_in_the_background_changes_nothing(place: Path, tmp_path: Path):
    plain = [argument for argument in arguments(place, tmp_path) if argument != "--run.async-save"]
    assert cli.main(plain) == 0
    assert metrics(tmp_path) == metrics(place / "straight")
    ends = [run / "checkpoints" / f"step_{STEPS}" for run in (tmp_path, place / "straight")]
    for name in (
        "policy/model.safetensors",
        "policy/optimizer.safetensors",
        "state.json",
        "rng.safetensors",
    ):
        assert ends[0].joinpath(name).read_bytes() == ends[1].joinpath(name).read_bytes(), name
    assert len({len(list(end.rglob("*"))) for end in ends}) == 1

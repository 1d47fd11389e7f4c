"""A run of two ranks, of which one is killed at any point, goes on bit for bit as if nothing had
happened. Environment variables set by hand stand in for torchrun, which would end the other rank.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemorl.runtime.store import checkpoint
from tests.ranks import held_port
from tests.runtime.runs import (
    addition_rows,
    lines,
    numbers,
    preference_rows,
    rows_file,
    saved_model,
)

ROOT = Path(__file__).parents[3]
STEPS = 4
REWARD = """
import random
def digits(prompt, response):
    return sum(c.isdigit() for c in response) / 4 + random.random()
"""
OWN = {
    "sft": ["--train-global-batch-size=8"],
    "dpo": ["--train-global-batch-size=8"],
    "grpo": [
        "--num-prompts-per-step=4",
        "--num-generations-per-prompt=2",
        "--generation.max-new-tokens=4",
    ],
}
PHASES = {
    "setup:1:after": None,
    "train_step:2:before": None,
    "save_checkpoint:1:after": None,
    "train_step:3:after": 2,
    "save_checkpoint:2:before": 2,
    "save_checkpoint:2:after": 2,
    "shutdown:1:before": STEPS,
}
"""Where a rank is killed, and the step of the checkpoint that the run continues from."""
SAMPLING = {"export_next:6:before": 2, "get_logprobs:4:after": 2}
"""In step 3: the engine gets the weights, and the trainer computes the samples' logprobs."""
POINTS = [
    pytest.param(name, f"{rank}:{phase}", step, id=f"{name} {rank}:{phase}")
    for name in OWN
    for phase, step in (PHASES | (SAMPLING if name == "grpo" else {})).items()
    for rank in (0, 1)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and a reward."""
    folder = saved_model(tmp_path_factory.mktemp("place"))
    (folder / "reward.py").write_text(REWARD)
    rows_file(folder / "pairs.jsonl", preference_rows())
    rows_file(folder / "rows.jsonl", addition_rows())
    return folder


def run(forked: Path, place: Path, name: str, folder: Path, *more: str, point: str = "") -> list:
    """The exit codes of two ranks."""
    rows = place / ("pairs.jsonl" if name == "dpo" else "rows.jsonl")
    arguments = [
        *(name, f"--model.path={place}", f"--data.train={rows}", f"--run.dir={folder}", *OWN[name]),
        *(f"--max-num-steps={STEPS}", "--run.save-period=2", "--run.display=none", "--run.loggers"),
        *("--run.no-plots", "--run.no-export", "--trainer.device=cpu", "--parallel.dp-shard=2"),
        *("--data.max-total-sequence-length=32", *more),
    ]
    if name == "grpo":
        arguments.append(f"--reward={place}/reward.py:digits")
    meeting = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting |= {"OMP_NUM_THREADS": "1"}
    with held_port() as held:
        meeting["MASTER_PORT"] = str(held.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [forked / "python", "-m", "tests.runtime.ranks.killed", point, *arguments],
                env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in "01"
        ]
        try:
            said = [rank.communicate(timeout=1000)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert point or codes == [0, 0], said
    return codes


def outcome(folder: Path) -> tuple[Any, ...]:
    """Every number of the run, bit for bit."""
    last = folder / "checkpoints" / f"step_{STEPS}"
    checkpoint.verify(last)
    tensors = {
        f"{file.relative_to(last)}/{name}": value.numpy().tobytes()
        for file in last.rglob("*.safetensors")
        for name, value in load_file(file).items()
    }
    samples = [file.read_text() for file in sorted(folder.glob("samples/*"))]
    return list(map(numbers, lines(folder, "metrics.jsonl"))), tensors, samples


@pytest.fixture(scope="module")
def unbroken(forked: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of a run by its name."""
    found: dict[str, tuple[Any, ...]] = {}

    def of(name: str) -> tuple[Any, ...]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name) / "run"
            run(forked, place, name, folder)
            found[name] = outcome(folder)
        return found[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "point", "step"), POINTS)
def test_killed_at_any_point(
    forked: Path,
    place: Path,
    unbroken: Any,
    tmp_path: Path,
    name: str,
    point: str,
    step: int | None,
):
    folder, killed = tmp_path / "run", int(point[0])
    codes = run(forked, place, name, folder, point=point)
    assert codes[killed] == -signal.SIGKILL
    if step != STEPS:  # the other was not done yet
        assert codes[1 - killed] not in (0, -signal.SIGKILL)
    latest = checkpoint.latest(folder)
    assert (latest and latest.name) == (step and f"step_{step}")
    if latest is None:  # there is nothing to go on from: the user removes the folder
        shutil.rmtree(folder)
    run(forked, place, name, folder, *(["--run.resume"] if latest else []))
    assert not list((folder / "checkpoints").glob(".tmp*"))
    assert outcome(folder) == unbroken(name)

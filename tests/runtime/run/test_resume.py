"""2N steps == N steps + kill + resume + N steps, bit for bit on a CPU, for every loop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.runs import TIMES

STEPS = 6
ALGORITHMS = {
    "sft": {"algorithm": "sft"},
    "grpo": {"algorithm": "grpo"},
    "grpo with minibatches, a reference and dynamic sampling": {
        "algorithm": "grpo",
        "options": {
            "train_global_batch_size": 8,
            "num_updates_per_batch": 2,
            "dynamic_sampling": True,
            "kl": {"coef": 0.1},
        },
    },
    "dpo with a reference at hand": {"algorithm": "dpo"},
    "dpo with a reference computed before, at once again after the kill": {
        "algorithm": "dpo",
        "options": {"reference": "precomputed"},
    },
    "kto": {"algorithm": "dpo", "options": {"loss": "kto", "reference": "precomputed"}},
    "sft with adapters and dropout in them": {
        "algorithm": "sft",
        "options": {"lora": {"rank": 2, "dropout": 0.3}},
    },
    "grpo with adapters and a reference": {
        "algorithm": "grpo",
        "options": {"lora": {"rank": 2}, "kl": {"coef": 0.1}},
    },
}

FRESH = {"grpo with minibatches, a reference and dynamic sampling"}
"""Whose processes have each a seed of hashing of their own, on which nothing may depend."""


def in_a_process(python: Path | str, **settings) -> int:
    """The exit code; negative: the signal that ended it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [python, "-m", "tests.runtime.runs", json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def outcome(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor], list[str]]:
    """Every number that the run left behind: metrics but for times, the last checkpoint's tensors,
    the samples.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    trainer = folder / "checkpoints" / f"step_{STEPS}" / "trainer"
    tensors = {
        f"{file.name}/{name}": value
        for file in trainer.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    return metrics, tensors, [path.read_text() for path in sorted(folder.glob("samples/*.jsonl"))]


def assert_equal_outcomes(a: Path, b: Path) -> None:
    (metrics, tensors, samples), (other_metrics, other_tensors, other_samples) = (
        outcome(a),
        outcome(b),
    )
    assert metrics == other_metrics
    assert samples == other_samples
    assert tensors.keys() == other_tensors.keys()
    for name in tensors:
        assert torch.equal(tensors[name], other_tensors[name]), name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_between_two_steps_and_in_a_checkpoint(name: str, forked: Path, tmp_path: Path):
    """Checkpoints come every second step.

    The first kill loses step 3; the second leaves half of step 4's checkpoint, so step 2's is used
    again.
    """
    settings, python = ALGORITHMS[name], sys.executable if name in FRESH else forked / "python"
    assert (
        in_a_process(
            python, **settings, folder=str(tmp_path / "straight"), steps=STEPS, resume=False
        )
        == 0
    )
    killed = {"folder": str(tmp_path / "killed"), "steps": STEPS}
    assert (
        in_a_process(python, **settings, **killed, resume=False, kill="between", at=3)
        == -signal.SIGKILL
    )
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*")] == [
        "step_2"
    ]
    assert (
        in_a_process(python, **settings, **killed, resume=True, kill="checkpoint", at=4)
        == -signal.SIGKILL
    )
    assert not (tmp_path / "killed" / "checkpoints" / "step_4").exists()
    assert in_a_process(python, **settings, **killed, resume=True) == 0
    assert_equal_outcomes(tmp_path / "straight", tmp_path / "killed")


def test_the_comparison_can_fail(forked: Path, tmp_path: Path):
    """One flipped bit in one weight is noticed."""
    assert (
        in_a_process(
            forked / "python",
            algorithm="sft",
            folder=str(tmp_path / "a"),
            steps=STEPS,
            resume=False,
        )
        == 0
    )
    assert (
        in_a_process(
            forked / "python",
            algorithm="sft",
            folder=str(tmp_path / "b"),
            steps=STEPS,
            resume=False,
        )
        == 0
    )
    state = tmp_path / "b" / "checkpoints" / f"step_{STEPS}" / "trainer" / "model.safetensors"
    assert_equal_outcomes(tmp_path / "a", tmp_path / "b")
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    with pytest.raises(AssertionError):
        assert_equal_outcomes(tmp_path / "a", tmp_path / "b")

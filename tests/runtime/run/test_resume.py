"""2N steps == N steps + kill + resume + N steps, bit for bit on a CPU, for every loop."""

import json
import os
import shutil
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
    "sft of a stream": {
        "algorithm": "sft",
        "options": {"data": {"streaming": True}},
    },
    "grpo of a stream": {
        "algorithm": "grpo",
        "options": {"data": {"streaming": True}, "dynamic_sampling": True},
    },
    "grpo with adapters and a reference": {
        "algorithm": "grpo",
        "options": {"lora": {"rank": 2}, "kl": {"coef": 0.1}},
    },
}

FRESH = {"grpo with minibatches, a reference and dynamic sampling"}
"""Whose last process has a seed of hashing of its own, on which nothing may depend."""
QUICK = {
    *FRESH,
    "dpo with a reference computed before, at once again after the kill",
    "sft with adapters and dropout in them",
    "grpo of a stream",
}


def in_a_process(python: Path | str, *, killed: bool = False, **settings) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [python, "-m", "tests.runtime.runs", json.dumps({"steps": STEPS, **settings})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr


def outcome(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor], list[str]]:
    """Every number that the run left behind: metrics but for times, the last checkpoint's tensors,
    the samples.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    trainer = folder / "checkpoints" / f"step_{STEPS}" / "policy"
    tensors = {
        f"{file.name}/{name}": value
        for file in trainer.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    return metrics, tensors, [path.read_text() for path in sorted(folder.glob("samples/*.jsonl"))]


def assert_equal_outcomes(a: Path, b: Path) -> None:
    (metrics, tensors, samples), (others, other_tensors, other_samples) = outcome(a), outcome(b)
    assert (metrics, samples, tensors.keys()) == (others, other_samples, other_tensors.keys())
    for name in tensors:
        assert torch.equal(tensors[name], other_tensors[name]), name


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS]
)
def test_killed_between_two_steps_and_in_a_checkpoint(name: str, forked: Path, tmp_path: Path):
    """Checkpoints come every second step.

    The first kill loses step 3; the second leaves half of step 4's checkpoint, so step 2's is used
    again.
    """
    python = forked / "python"
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    in_a_process(python, **ALGORITHMS[name], folder=str(straight), resume=False)
    settings = {**ALGORITHMS[name], "folder": str(folder)}
    in_a_process(python, **settings, killed=True, resume=False, kill="between", at=3)
    assert [path.name for path in folder.glob("checkpoints/step_*")] == ["step_2"]
    in_a_process(python, **settings, killed=True, resume=True, kill="checkpoint", at=4)
    assert not (folder / "checkpoints" / "step_4").exists()
    in_a_process(sys.executable if name in FRESH else python, **settings, resume=True)
    assert_equal_outcomes(straight, folder)


def test_the_comparison_can_fail(forked: Path, tmp_path: Path):
    """One flipped bit in one weight is noticed."""
    in_a_process(forked / "python", algorithm="sft", folder=str(tmp_path / "a"), resume=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert_equal_outcomes(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "checkpoints" / f"step_{STEPS}" / "policy" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(AssertionError):
        assert_equal_outcomes(tmp_path / "a", tmp_path / "b")

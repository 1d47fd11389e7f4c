"""2N steps == N steps + kill + resume + N steps, bit for bit on a CPU, for every loop."""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.killed import KillInTurn, assert_equal_outcomes, kill_and_resume, process, talk
from tests.runtime.runs import lines, prove, sft_config, start
from tests.runtime.tiny import flip_a_bit

STREAM = {"streaming": True}
REFERENCE = {"kl": {"coef": 0.1}}
UPDATES = {"train_global_batch_size": 8, "num_updates_per_batch": 2, "dynamic_sampling": True}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "grpo": {"algorithm": "grpo"},
    "grpo with minibatches, a reference and dynamic sampling": {
        "algorithm": "grpo",
        "options": UPDATES | REFERENCE,
    },
    "ppo with several passes, and its critic": {
        "algorithm": "ppo",
        "options": {"train_global_batch_size": 8, "num_updates_per_batch": 2},
    },
    "dpo with a reference at hand": {"algorithm": "dpo"},
    "dpo with a reference computed before, at once again after the kill": {
        "algorithm": "dpo",
        "options": {"reference": "precomputed"},
    },
    "distill with minibatches, of its own weights": {
        "algorithm": "distill",
        "options": {"train_global_batch_size": 4, "num_updates_per_batch": 2},
    },
    "kto": {"algorithm": "dpo", "options": {"loss": "kto", "reference": "precomputed"}},
    "rm": {"algorithm": "rm"},
    "sft with adapters and dropout in them": {
        "algorithm": "sft",
        "options": {"lora": {"rank": 2, "dropout": 0.3}},
    },
    "sft of a stream": {"algorithm": "sft", "options": {"data": STREAM}},
    "grpo of a stream": {
        "algorithm": "grpo",
        "options": {"data": STREAM, "dynamic_sampling": True},
    },
    "grpo with adapters and a reference": {
        "algorithm": "grpo",
        "options": {"lora": {"rank": 2}} | REFERENCE,
    },
}
FRESH = "grpo with minibatches, a reference and dynamic sampling"
"""The fast case, whose last process has a seed of hashing of its own."""
KILLS = [("between", 3), ("checkpoint", 4)]
"""Checkpoints come every second step: the first kill loses step 3, the second leaves half of step
4's checkpoint, so step 2's is used again.
"""


@pytest.mark.slow_cases(but=[FRESH])
@pytest.mark.parametrize("name", CASES)
def test_killed_between_two_steps_and_in_a_checkpoint(name: str, forked: Path, tmp_path: Path):
    last = sys.executable if name == FRESH else None
    kill_and_resume(forked / "python", tmp_path, KILLS, last=last, **CASES[name])


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(forked: Path, tmp_path: Path):
    kill_and_resume(forked / "python", tmp_path, [("between", 1)] * 2, algorithm="grpo")


@pytest.mark.slow
def test_a_loop_of_one_s_own_goes_on_after_a_kill(forked: Path, tmp_path: Path):
    kills = [("amid", 3), ("amid", 4)]
    kill_and_resume(forked / "python", tmp_path, kills, algorithm="grpo", own=True)


@pytest.mark.slow
def test_a_run_that_samples_ahead_loses_and_doubles_no_prompt(forked: Path, tmp_path: Path):
    """Killed in whatever turn, or ended by SIGTERM or Ctrl-C: it can't end before."""
    times, folders = 4, (tmp_path / "killed", tmp_path / "straight")
    steps = times * (2 + KillInTurn.TURNS // 12) + 1  # of 12 turns or more
    for seed in range(1, times + 1):
        done = process(
            forked / "python", algorithm="talk", folder=str(folders[0]), steps=steps, seed=seed
        )
        in_order = done.returncode == 128 + signal.SIGTERM or "KeyboardInterrupt" in done.stderr
        assert in_order or done.returncode == -signal.SIGKILL, done.stderr
    for folder in folders:
        talk(folder, steps=steps, seed=None)
        prove(folder, steps, count=3)
    metrics, other = (lines(folder, "metrics.jsonl") for folder in folders)
    assert [line["step"] for line in metrics] == [line["step"] for line in other]
    prompts = [
        {
            (line["step"], line["group"], line["prompt"])
            for file in folder.glob("samples/*")
            for line in map(json.loads, file.read_text().splitlines())
        }
        for folder in folders
    ]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 3 * steps


def test_the_comparison_can_fail(tmp_path: Path):
    """One flipped bit in one weight is noticed; saving in the background is not."""
    start(sft_config(tmp_path / "a", steps=2))
    start(sft_config(tmp_path / "background", steps=2, run={"async_save": True}))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("b", "background"):
        assert_equal_outcomes(tmp_path / "a", tmp_path / name)
    flip_a_bit(tmp_path / "b" / "checkpoints" / "step_2" / "policy" / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_equal_outcomes(tmp_path / "a", tmp_path / "b")

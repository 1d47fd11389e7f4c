"""A loop that takes prompts, or samples, one step ahead goes on after a SIGKILL: what is open is in
the checkpoint. Run as a script: HOW FOLDER RESUME STEP-OF-THE-KILL.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.losses import policy
from nemorl.losses.advantages import advantages, to_tokens
from nemorl.losses.masks import token_mean_weights
from nemorl.rollout.collect import Rollouts, to_token_batch
from tests.runtime.runs import addition_rows, digits, grpo_config, numbers
from tests.tiny_models import tiny_model, tiny_tokenizer

STEPS = 5
LOSS = nemorl.policy_loss(policy.clipped)


def learn(run: Any, step: Any, responses: Rollouts) -> None:
    batch = to_token_batch(responses)
    better = to_tokens(advantages(responses.rewards, responses.group_id), batch.loss_mask)
    weights = token_mean_weights(batch.loss_mask)
    batch = replace(batch, advantages=better, loss_weights=weights)
    step.log(run.trainer.train_step(batch, LOSS), samples=responses)


def with_prompts_ahead(run: Any, steps: Any, kill: int) -> None:
    """The first ones before the loop, and those of a step in the one before it."""
    prompts, mixed = run.prompts(), run.prompts(run.rows[:9], name="mixed")
    ahead = prompts.next(3)
    for step in steps:
        now, ahead = ahead, prompts.next(3, ahead=1)
        responses = step.sample(now, n=4)
        step.log({"other": float(step.sample(mixed.next(2)).rewards.mean())})
        killed_at(step, kill)
        learn(run, step, responses)


def with_responses_ahead(run: Any, steps: Any, kill: int) -> None:
    """Sampled at the end of the step before, by the weights that its checkpoint has."""
    prompts, ahead = run.prompts(), None
    for step in steps:
        responses = ahead or step.sample(prompts.next(3), n=4)
        killed_at(step, kill)
        learn(run, step, responses)
        ahead = step.sample(prompts.next(3, ahead=1), n=4)


LOOPS = {"prompts": with_prompts_ahead, "responses": with_responses_ahead}


def killed_at(step: Any, kill: int) -> None:
    if step.number == kill:
        os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, folder: str, resume: str, kill: str) -> None:
    config = grpo_config(
        Path(folder), steps=STEPS, run={"save_period": 2, "resume": resume == "resume"}
    )
    with nemorl.open_run(
        config,
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        train=addition_rows(),
        reward=digits,
    ) as run:
        LOOPS[how](run, run.steps(STEPS), int(kill))


def of(folder: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The metrics of every step, and its samples."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    samples = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "samples").iterdir())
    ]
    return list(map(numbers, lines)), samples


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoints/step_{step}/state.json").read_text())


@pytest.mark.parametrize("how", LOOPS)
def test_a_loop_that_works_ahead_goes_on_after_a_kill(how: str, forked: Path, tmp_path: Path):
    main(how, str(tmp_path / "whole"), "begin", "0")
    killed = str(tmp_path / "killed")
    command = [forked / "python", "-m", "tests.runtime.run.test_ahead", how, killed]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for resume, kill in (("begin", "3"), ("resume", "4")):
        done = subprocess.run(
            [*command, resume, kill], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
    state = state_of(tmp_path / "killed", 2)
    assert len(state["open_groups"]) == 3
    assert {(group["stream"], group["step"]) for group in state["open_groups"]} == {("train", 3)}
    main(how, killed, "resume", "0")
    assert of(tmp_path / "killed") == of(tmp_path / "whole")
    last, straight = (state_of(tmp_path / name, STEPS) for name in ("killed", "whole"))
    assert last == straight and last["cursors"]["train"] == 3 * (STEPS + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])

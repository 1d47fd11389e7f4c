"""Two models in one loop: a student samples, and learns to give its own tokens the probability that
a teacher gives them (on-policy distillation; Agarwal et al. 2023, reverse KL by policy gradient).

    python examples/two_models.py                                            a small demonstration
    python examples/two_models.py --teacher … --model.path … --data.train … --run.dir runs/student
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import nemorl as nr
import torch
from nemorl.losses import masks, policy
from nemorl.rollout.collect import to_token_batch


@dataclass(frozen=True, kw_only=True)
class DistillConfig(nr.GRPOConfig):
    """Distill a teacher into a student, on what the student samples."""

    teacher: str = ""
    """Folder or hub name of the teacher; of the same tokenizer."""


def main(config: DistillConfig) -> nr.TrainResult:
    loss_fn = nr.policy_loss(policy.reinforce)
    with nr.open_run(config) as run:
        prompts, teacher = run.prompts(), run.frozen_model(config.teacher)
        for step in run.steps(config.max_num_steps):
            responses = step.sample(prompts.next(config.num_prompts_per_step), n=4)
            batch = to_token_batch(responses)
            ours, theirs = run.trainer.get_logprobs(batch), teacher.get_logprobs(batch)
            gain = torch.where(batch.loss_mask, theirs.values - ours.values, 0.0)
            weights = masks.token_mean_weights(batch.loss_mask)
            batch = replace(batch, advantages=gain, loss_weights=weights)
            metrics = run.trainer.train_step(batch, loss_fn)
            step.log({"reverse_kl": -float((weights * gain).sum()), **metrics}, samples=responses)
    return run.result


def demonstration(folder: Path, *flags: str) -> list[str]:
    """Return the flags with which an untrained student learns from a teacher that can add 1."""
    from grpo_loop import demonstration as taught
    from grpo_loop import main as teach

    lessons = taught(folder / "teacher", "--run.display=none")
    teach(nr.cli(nr.GRPOConfig, lessons))
    return [*lessons, f"--teacher={folder / 'teacher/run/hf'}", f"--run.dir={folder / 'run'}",
            "--run.display=plain", *flags]  # fmt: skip


if __name__ == "__main__":
    flags = sys.argv[1:] or demonstration(Path("runs/two_models"))
    main(nr.cli(DistillConfig, flags))

"""On-policy distillation as a script: the teacher says what it thinks of the student's own words.

    python examples/distill.py                                   a small demonstration
    python examples/distill.py --model.path … --teacher … --data.train … --run.dir runs/distilled

`nemorl distill` has more: teachers in engines or behind a URL, several, and the student itself.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import nemorl as nr
from nemorl.losses import distillation_topk, masks


@dataclass(frozen=True, kw_only=True)
class Config(nr.GRPOConfig):
    """On-policy distillation."""

    teacher: str | None = None
    """The teacher's folder."""


@nr.needs(targets=True)
def loss_fn(output, batch):
    """Return KL(student‖teacher), in which all but the teacher's tokens are one outcome."""
    student = output.target_logprobs, output.target_rest_logprobs
    teacher = batch.target_ids, batch.teacher_logprobs
    options = {"direction": "reverse", "outside": "rest_mass"}
    return distillation_topk(*student, *teacher, batch.loss_weights, **options)


def main(config: Config) -> nr.TrainResult:
    with nr.open_run(config) as run:
        teacher, prompts = run.backend("teacher", model=config.teacher, trains=False), run.prompts()
        for step in run.steps(config.max_num_steps):
            found = step.sample(prompts, count=config.num_prompts_per_step)
            batch = found.to_batch(weights=masks.token_mean_weights)
            said = teacher.compute(batch, nr.Needs(top_k=8))
            taught = replace(batch, target_ids=said.top_ids, teacher_logprobs=said.top_logprobs)
            step.train(taught, loss_fn)
    return run.result


if __name__ == "__main__":
    from quickstart import demonstration

    flags = sys.argv[1:]
    if not flags:  # a teacher that knows more, by GRPO
        flags = demonstration(Path("runs/distill"))
        lessons = nr.cli(nr.GRPOConfig, [*flags, "--run.dir=runs/distill/teacher"])
        flags += [f"--teacher={nr.run(lessons).paths.hf}", "--max-num-steps=20"]
    main(nr.cli(Config, flags))

"""GRPO as a script: the whole algorithm in the order of time. Change any line of it.

    python examples/grpo_loop.py                                  a small demonstration
    python examples/grpo_loop.py --model.path … --data.train … --reward math --run.dir runs/mine
    python examples/grpo_loop.py --run.dir runs/mine --run.resume    after a kill: the same numbers

`--async.max-staleness 2` samples while the trainer steps, up to two steps ahead.
`--connect URL` trains and samples at a service: `nemorl serve MODEL --tinker` prints its URL, and
TINKER_API_KEY=… to export. `--help` lists all settings, of one device or many, with either engine.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import nemorl as nr
from nemorl.losses import advantages, masks, policy


@dataclass(frozen=True, kw_only=True)
class Config(nr.GRPOConfig):
    """GRPO, here or at a service."""

    connect: str | None = None
    """URL of the service that trains and samples. Default: this machine does."""


def main(config: nr.GRPOConfig) -> nr.TrainResult:
    older = {"mode": "truncate"} if config.max_staleness else None  # weights of older tokens
    loss_fn = nr.policy_loss(policy.clipped, clip_low=0.2, clip_high=0.28, off_policy=older)
    size, count = config.num_generations_per_prompt, config.num_prompts_per_step
    with nr.open_run(config) as run:
        prompts = run.prompts()
        for step in run.steps(config.max_num_steps):
            groups = step.sample(prompts, count=count, n=size)
            batch = groups.to_batch(advantages.grpo, masks.token_mean_weights)
            step.train(batch, loss_fn)
    return run.result


if __name__ == "__main__":
    from quickstart import demonstration

    config = nr.cli(Config, sys.argv[1:] or demonstration(Path("runs/grpo_loop")))
    main(nr.connect(config, config.connect) if config.connect else config)

"""GRPO that samples while it trains: grpo_loop.py with a few other lines, which have a comment.

    python examples/async_loop.py                                 a small demonstration
    python examples/async_loop.py --model.path … --data.train … --reward math --run.dir runs/mine \\
        --generation.backend vllm --generation.colocated false --async.max-staleness 2

`--async.max-staleness 0` samples as grpo_loop.py does.
"""

import sys
from dataclasses import replace
from pathlib import Path

import nemorl as nr
from nemorl.losses import advantages, masks, policy
from nemorl.rollout.collect import to_token_batch


def main(config: nr.GRPOConfig) -> nr.TrainResult:
    older = {"mode": "truncate"}  # the correction for tokens of older weights
    loss_fn = nr.policy_loss(policy.clipped, clip_low=0.2, clip_high=0.28, off_policy=older)
    size, count = config.num_generations_per_prompt, config.num_prompts_per_step
    with nr.open_run(config) as run:
        stream = run.groups(run.prompts(), count=count, n=size)  # sampled ahead
        for step in run.steps(config.max_num_steps):
            groups = stream.next()  # waits only for what is not done
            batch = to_token_batch(groups)
            better = advantages.advantages(groups.rewards, groups.group_id)
            batch = replace(
                batch,
                advantages=advantages.to_tokens(better, batch.loss_mask),
                loss_weights=masks.token_mean_weights(batch.loss_mask),
            )
            step.log(run.trainer.train_step(batch, loss_fn), samples=groups)
    return run.result


if __name__ == "__main__":
    from grpo_loop import demonstration

    ahead = "--async.max-staleness=2"
    flags = sys.argv[1:] or demonstration(Path("runs/async_loop"), ahead)
    main(nr.cli(nr.GRPOConfig, flags))

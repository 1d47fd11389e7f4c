"""PPO as a script: a policy, and a critic that learns which reward to expect after each token.

python examples/two_models.py                                            a small demonstration
python examples/two_models.py --model.path … --data.train … --run.dir runs/critic
python examples/two_models.py --run.dir runs/critic --run.resume    after a kill: as if without
"""

import sys
from dataclasses import replace
from pathlib import Path

import nemorl as nr
from nemorl.losses import LossOutput, advantages, masks, policy, value_loss
from nemorl.parallel.backend import ForwardOutput


@nr.needs(values=True)
def critic_loss(output: ForwardOutput, batch: nr.TokenBatch) -> LossOutput:
    return value_loss(output.values, batch.values, batch.returns, batch.loss_weights, clip=0.2)


def main(config: nr.PPOConfig) -> nr.TrainResult:
    loss_fn, size = nr.policy_loss(policy.clipped), config.num_generations_per_prompt
    with nr.open_run(config) as run:
        optimizer = replace(config.optimizer, lr=config.critic.lr)
        critic, prompts = run.backend("critic", head="scalar", optimizer=optimizer), run.prompts()
        for step in run.steps(config.max_num_steps):
            groups = step.sample(prompts, count=config.num_prompts_per_step, n=size)
            batch = groups.to_batch(weights=masks.token_mean_weights)
            values = critic.compute(batch, nr.Needs(values=True)).values
            rewards = advantages.at_last_token(groups.rewards, batch.loss_mask)
            better, returns = advantages.gae(rewards, values, batch.loss_mask)
            better = advantages.whiten(better, batch.loss_mask)
            batch = replace(batch, advantages=better, values=values, returns=returns)
            step.train(batch, critic_loss, backend="critic")
            step.train(batch, loss_fn)
    return run.result


if __name__ == "__main__":
    from quickstart import demonstration

    lessons = demonstration(Path("runs/two_models"), "--critic.lr=1e-3", "--run.save-period=5")
    main(nr.cli(nr.PPOConfig, sys.argv[1:] or lessons))

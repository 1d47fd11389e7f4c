"""Two models that train in one loop: the policy by REINFORCE, and a critic that learns which reward
to expect after each token, the policy's baseline (Williams 1992; Sutton et al. 2000).

    python examples/two_models.py                                            a small demonstration
    python examples/two_models.py --model.path … --data.train … --run.dir runs/critic
    python examples/two_models.py --run.dir runs/critic --run.resume    after a kill: as if without
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import nemorl as nr
import torch
from nemorl.losses import LossOutput, masks, policy, value_loss
from nemorl.parallel.backend import ForwardOutput


@dataclass(frozen=True, kw_only=True)
class CriticConfig(nr.GRPOConfig):
    """REINFORCE with a critic."""

    critic_lr: float = 1e-4
    """Learning rate of the critic."""
    critic_own_ranks: bool = False
    """Whether the critic has ranks of its own, as many as the policy."""


@nr.needs(values=True)
def critic_loss(output: ForwardOutput, batch: nr.TokenBatch) -> LossOutput:
    """Return the squared error of the values; the reward stands in the place of advantages."""
    values = output.values
    return value_loss(values, values.detach(), batch.advantages, batch.loss_weights, clip=None)


def main(config: CriticConfig) -> nr.TrainResult:
    loss_fn = nr.policy_loss(policy.reinforce)
    optimizer = replace(config.optimizer, lr=config.critic_lr)
    with nr.open_run(config) as run:
        own = config.critic_own_ranks
        critic = run.backend("critic", head="scalar", optimizer=optimizer, own_ranks=own)
        prompts, size = run.prompts(), config.num_generations_per_prompt
        for step in run.steps(config.max_num_steps):
            groups = step.sample(prompts, count=config.num_prompts_per_step, n=size)
            batch = groups.to_batch(groups.rewards, masks.token_mean_weights)
            expected = critic.compute(batch, nr.Needs(values=True)).values
            better = torch.where(batch.loss_mask, batch.advantages - expected, 0.0)
            step.train(replace(batch, advantages=better), loss_fn)
            step.train(batch, critic_loss, backend="critic")
    return run.result


if __name__ == "__main__":
    from quickstart import demonstration

    lessons = demonstration(Path("runs/two_models"), "--critic-lr=1e-3", "--run.save-period=5")
    main(nr.cli(CriticConfig, sys.argv[1:] or lessons))

"""PPO: a policy, and a critic that learns to predict rewards."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.data.batch import TokenBatch, take
from nemorl.losses import advantages as adv
from nemorl.losses.types import LossOutput, Needs, finalize, mean_of, needs
from nemorl.losses.value import explained_variance, value_loss
from nemorl.models import hub
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms import policy_loss, responses
from nemorl.runtime.config.ppo import GAEAdvantage, PPOConfig
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.samples import beside


def ppo(run: Run[PPOConfig]) -> None:
    """Sample responses, and train a policy and its critic on them."""
    config, of_critic, prompts = run.config, run.config.critic, run.prompts()
    if of_critic.model is not None:
        trust = config.model.trust_remote_code
        folder = hub.model_folder(of_critic.model, field="critic.model")
        if not Path(folder).is_dir() or any(Path(folder).glob("tokenizer*")):
            theirs = hub.reader(hub.load_tokenizer(folder, trust_remote_code=trust))
            hub.require_same_tokens("critic.model", run.tokenizer, theirs)
    critic = run.backend(
        "critic",
        model=of_critic.model,
        head="scalar",
        optimizer=replace(config.optimizer, lr=of_critic.lr),
        own_ranks=of_critic.own_ranks,
    )
    shaping, loss_weights = policy_loss.make_shaping(config), policy_loss.make_loss_weights(config)
    loss_fn, of_values = policy_loss.make_loss(config), partial(critic_loss, clip=of_critic.clip)
    count, size = config.num_prompts_per_step, config.num_generations_per_prompt
    for step in run.steps(config.max_num_steps):
        rollouts, version = step.sample(prompts, count=count, n=size), run.trainer.step
        with step.timed("train"):
            updates = list(responses.minibatches(len(rollouts), config, seed=step.seed))
            batch = responses.with_logprobs(run, rollouts.to_batch(), several=len(updates) > 1)
            values = responses.by_segment(
                lambda part: critic.compute(part, Needs(values=True)).values, batch
            )
            mask = batch.loss_mask & responses.trained_rows(config, rollouts)[:, None]
            batch = replace(batch, loss_mask=mask, values=values)
            better, returns = estimated(batch, values, shaping(rollouts), config.advantage)
            batch = replace(batch, advantages=better, returns=returns)
            shown = responses.compared_samples(run, rollouts, batch, shaping)
            for rows in updates:
                part, loss = take(batch, rows), loss_fn
                weights = loss_weights(part.loss_mask, rollouts.group_id[rows])
                part = replace(part, loss_weights=weights)
                if part.loss_mask.any():
                    step.train(part, of_values, backend="critic")
                if step.number > of_critic.warmup_steps and responses.teaches(config, part):
                    if config.interpolates:
                        present = run.trainer.step
                        loss = policy_loss.at_version(loss_fn, version=version, present=present)
                    step.train(part, loss)
        fit = finalize(value_loss(values, values, returns, mask.float()).metrics)
        own = {"critic/explained_variance": explained_variance(fit)}
        if config.needs_kl_reward:
            own["kl"] = mean_of(policy_loss.reference_kl(batch), mask).finalize()
        updated = run.trainer.step > version
        found = responses.measurements(run, step, rollouts, shaping, updated=updated)
        step.log(beside(own, found), samples=shown)


def estimated(
    batch: TokenBatch,
    values: Float[Tensor, "batch seq"],
    rewards: Float[Tensor, "batch"],
    config: GAEAdvantage,
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"]]:
    """Return advantages and returns of conversations, whose rewards are at their last tokens."""
    mask, lam = batch.loss_mask, torch.full_like(rewards, config.lam)
    if config.length_alpha is not None:
        lam = adv.length_adaptive_lambda(mask.sum(-1), alpha=config.length_alpha)
    given = adv.at_last_token(rewards, mask) - config.kl_coef * policy_loss.reference_kl(batch)
    better, returns = adv.gae(
        given, values, mask, gamma=config.gamma, lam=lam, value_lam=config.value_lam
    )
    return adv.whiten(better, mask) if config.whiten else better, returns


@needs(values=True)
def critic_loss(output: ForwardOutput, batch: TokenBatch, *, clip: float | None) -> LossOutput:
    """Return the squared error of the values, clipped around those before the update."""
    assert batch.values is not None and batch.returns is not None
    assert batch.loss_weights is not None
    return value_loss(output.values, batch.values, batch.returns, batch.loss_weights, clip=clip)

"""GRPO and its relatives: sample groups of responses, and move towards the better ones."""

from dataclasses import replace

from nemorl.data.batch import take
from nemorl.runtime.algorithms.policy_loss import (
    at_version,
    make_advantages,
    make_loss,
    make_loss_weights,
    make_shaping,
)
from nemorl.runtime.algorithms.responses import (
    compared_samples,
    measurements,
    minibatches,
    roll_out,
    teaches,
    trained_rows,
    with_logprobs,
)
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.samples import beside


def grpo(run: Run[GRPOConfig]) -> None:
    """Sample groups of responses, score and compare them, and update the policy on them, unless
    there is nothing to learn: Adam's momentum would move the weights all the same.
    """
    config, prompts = run.config, run.prompts()
    shaping, advantages = make_shaping(config), make_advantages(config)
    loss_weights, loss_fn = make_loss_weights(config), make_loss(config)
    for step in run.steps(config.max_num_steps):
        rollouts, everything = roll_out(run, step, prompts)
        with step.timed("train"):
            updates = list(minibatches(len(rollouts), config, seed=step.seed))
            batch = with_logprobs(run, rollouts.to_batch(), several=len(updates) > 1)
            trains = trained_rows(config, rollouts)
            batch = replace(batch, loss_mask=batch.loss_mask & trains[:, None])
            batch = replace(batch, advantages=advantages(rollouts, batch))
            step.log({}, samples=compared_samples(run, rollouts, batch, shaping))
            version = run.trainer.step
            for rows in updates:
                part, loss = take(batch, rows), loss_fn
                if teaches(config, part):
                    weights = loss_weights(part.loss_mask, rollouts.group_id[rows])
                    if config.interpolates:
                        loss = at_version(loss_fn, version=version, present=run.trainer.step)
                    step.train(replace(part, loss_weights=weights), loss)
        found = measurements(run, step, everything, shaping, updated=step.updates > 0)
        kept = found.get("informative_groups", 0.0) if config.dynamic_sampling else 1.0
        step.log(beside({"groups_kept": kept}, found))

"""Distillation: a student learns from its teachers' probabilities."""

from dataclasses import replace

import torch

from nemorl.data.batch import collate, take
from nemorl.data.rows import first_of
from nemorl.losses.logprobs import LogprobKind
from nemorl.rollout.answers import unjudged
from nemorl.rollout.environments import make_environment
from nemorl.runtime.algorithms.policy_loss import make_advantages, make_loss_weights
from nemorl.runtime.algorithms.responses import minibatches, trained_rows, with_logprobs
from nemorl.runtime.algorithms.sft import demonstrations
from nemorl.runtime.algorithms.teachers import make_loss, open_teachers
from nemorl.runtime.config.distill import DistillConfig
from nemorl.runtime.run.loop import Run


def distill(run: Run[DistillConfig]) -> None:
    """Have teachers score the tokens of responses, and move the student towards them."""
    config, count = run.config, run.config.num_prompts_per_step
    loss_weights, loss_fn = make_loss_weights(config), make_loss(config)
    advantages, several = make_advantages(config), config.updates_per_step > 1
    validate = run.questions([r for r in run.validation_rows if r.get("answer") is not None])
    asks = config.rollout.environment or config.rollout.agent or config.reward_coef
    asks = asks or config.reward != DistillConfig.reward
    if not asks and all(row.get("answer") is None for row in first_of(run.rows)):
        run.environment = make_environment(unjudged)  # as nothing asks for rewards
    with open_teachers(run) as teach:
        if config.on_policy:
            prompts = run.prompts()
        else:
            examples, found = demonstrations(run, "train", run.rows)
            order = run.order(found)
        for step in run.steps(config.max_num_steps, validate=validate):
            if config.on_policy:
                rollouts = step.sample(prompts, count=count, n=config.num_generations_per_prompt)
                batch = with_logprobs(run, rollouts.to_batch(), several=several)
                trains = batch.loss_mask & trained_rows(config, rollouts)[:, None]
                batch = replace(batch, loss_mask=trains, advantages=torch.zeros(trains.shape))
                if config.reward_coef:
                    better = config.reward_coef * advantages(rollouts, batch)
                    batch = replace(batch, advantages=better)
                rows, groups = rollouts.rows, rollouts.group_id
            else:
                places, kind = order.next(count), LogprobKind(config.generation.temperature)
                batch = collate([examples[i] for i in places], logprob_kind=kind)
                rows, groups = [found[i] for i in places], torch.arange(count)
            with step.timed("teacher"):
                batch = teach(batch, rows)
            for some in minibatches(len(batch), config, seed=step.seed):
                part = take(batch, some)
                weights = loss_weights(part.loss_mask, groups[some])
                if part.loss_mask.any():
                    step.train(replace(part, loss_weights=weights), loss_fn)

"""GRPO and its relatives: sample groups of responses, and move towards the better ones."""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from nemorl.data.batch import TokenBatch, take
from nemorl.data.packing import segments_apart
from nemorl.data.sources import set_names
from nemorl.rollout.collect import Rollouts, to_token_batch
from nemorl.runtime.algorithms.common import (
    by_segment,
    minibatches,
    of_this_batch,
    with_prev_logprobs,
)
from nemorl.runtime.algorithms.policy_loss import (
    at_version,
    make_advantages,
    make_loss,
    make_loss_weights,
    make_shaping,
)
from nemorl.runtime.algorithms.receipts import TokenReceipt, read_at_once, with_receipts
from nemorl.runtime.algorithms.sampling import compared_samples, roll_out
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.presets import nearest_preset
from nemorl.runtime.run.loop import OpenRun
from nemorl.runtime.run.receipts import Receipts
from nemorl.runtime.run.samples import beside, by_set, compared, informative
from nemorl.runtime.watch.log import event


def grpo(run: OpenRun) -> None:
    """Sample groups of responses, score them, compare them, and update the policy on them.

    An optimizer step from which nothing can be learned is not taken: Adam's momentum would move the
    weights all the same.
    """
    config = run.config
    count, size = config.num_prompts_per_step, config.num_generations_per_prompt
    groups = run.groups(run.prompts(), count=count, n=size)
    say_preset(config)
    shaping, advantages = make_shaping(config), make_advantages(config)
    loss_weights, loss_fn = make_loss_weights(config), make_loss(config)
    receipts = Receipts(config.receipts)
    for step in run.steps(config.max_num_steps):
        rollouts, everything = roll_out(run, groups)
        with step.timed("train"):
            batch = with_logprobs(run, to_token_batch(rollouts))
            trains = trained_rows(config, rollouts)
            batch = replace(batch, loss_mask=batch.loss_mask & trains[:, None])
            batch = replace(batch, advantages=advantages(rollouts, batch))
            step.log({}, samples=compared_samples(run, rollouts, batch, shaping))
            receipt = TokenReceipt(rollouts, trains)
            learned, version = [], run.trainer.step
            for rows in minibatches(len(batch), config, seed=step.seed):
                part = take(batch, rows)
                if teaches(config, part):
                    weights = loss_weights(part.loss_mask, rollouts.group_id[rows])
                    part = replace(part, loss_weights=weights)
                    loss = loss_fn
                    if config.interpolates:
                        loss = at_version(loss_fn, version=version, present=run.trainer.step)
                    loss = with_receipts(loss, fresh=run.trainer.step == version)
                    trained = run.trainer.train_step(segments_apart(part)[0], loss)
                    learned.append((trained, rows))
            for trained, rows in read_at_once(learned):
                step.log(receipt.add(trained, rows))
            step.log(receipt.check(receipts, step.number, stale=step.staleness > 0))
        found = compared(everything, config) | by_set(everything, set_names(config.data.train))
        kept = found.get("informative_groups", 0.0) if config.dynamic_sampling else 1.0
        own = {"groups_kept": kept, "num_updates": float(len(learned))}
        if config.overlong.buffer:
            own["shaped_reward"] = float(shaping(everything).mean())
        if not learned:
            own |= {"loss": 0.0, "grad_norm": 0.0}
        step.log(beside(own, found))


def say_preset(config: GRPOConfig) -> None:
    """Print and log which preset the settings are nearest to, and how they differ from it."""
    line = nearest_preset(config)
    event("preset", line)
    if config.run.display != "none":
        print(line)


def trained_rows(config: GRPOConfig, rollouts: Rollouts) -> Bool[Tensor, "batch"]:
    """Return True for conversations that are trained on: without truncated ones where
    overlong.filter says so, and groups that dynamic sampling rejects (the last round's, where it
    found no other).
    """
    kept = torch.ones(len(rollouts), dtype=torch.bool)
    if config.overlong.filter:
        kept &= ~rollouts.truncated
    if config.dynamic_sampling:
        kept &= informative(rollouts, config)
    return kept


def teaches(config: GRPOConfig, batch: TokenBatch) -> bool:
    """Return whether the batch's loss has a gradient: an advantage, a KL penalty or an entropy
    bonus of a trained token.
    """
    assert batch.advantages is not None
    if config.kl.coef or config.entropy_coef:
        return bool(batch.loss_mask.any())
    return bool((batch.advantages != 0).any())


def with_logprobs(run: OpenRun, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the logprobs that the loss compares."""
    config, trainer = run.config, run.trainer
    if config.needs_reference:
        reference = by_segment(trainer.get_reference_logprobs, batch)
        values = of_this_batch(reference, batch, "reference_logprobs")
        batch = replace(batch, reference_logprobs=values)
    several = config.updates_on(len(batch)) > 1 and not config.interpolates
    if several or config.needs_kl_reward:
        batch = with_prev_logprobs(run, batch)
    return batch

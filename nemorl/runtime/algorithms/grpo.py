"""GRPO and its relatives: sample groups of responses, and move towards the better ones."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.losses.logprobs import Logprobs, require_same_support
from nemorl.losses.rewards import informative_groups, overlong_filter
from nemorl.rollout.collect import Rollouts, join, select, to_token_batch
from nemorl.rollout.random import derive_seed
from nemorl.runtime.algorithms.policy_loss import (
    Shaping,
    make_advantages,
    make_loss,
    make_loss_weights,
    make_shaping,
)
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.run.loop import OpenRun, PromptStream, Step
from nemorl.runtime.run.samples import Samples, measured, samples_of, whole_groups, worst_tokens


def grpo(run: OpenRun) -> None:
    """Sample groups of responses, score them, compare them, and update the policy on them.

    An optimizer step from which nothing can be learned is not taken: Adam's momentum would move the
    weights all the same.
    """
    config, prompts = run.config, run.prompts()
    shaping, advantages = make_shaping(config), make_advantages(config)
    loss_weights, loss_fn = make_loss_weights(config), make_loss(config)
    responses = config.num_prompts_per_step * config.num_generations_per_prompt
    updates = updates_per_batch(config, responses)
    for step in run.steps(config.max_num_steps, updates_per_step=updates):
        rollouts, everything, informative = roll_out(run, step, prompts)
        with step.timed("train"):
            batch = with_logprobs(run, to_token_batch(rollouts))
            batch = replace(batch, loss_mask=trained_tokens(config, rollouts, batch))
            batch = replace(batch, advantages=advantages(rollouts, batch))
            step.log({}, samples=compared_samples(run, rollouts, batch, shaping))
            num_updates = 0
            for rows in minibatches(len(batch), config, seed=step.seed):
                part = take(batch, rows)
                if teaches(config, part):
                    weights = loss_weights(part.loss_mask, rollouts.group_id[rows])
                    part = replace(part, loss_weights=weights)
                    step.log(run.trainer.train_step(part, loss_fn))
                    num_updates += 1
        share = float(informative.float().mean())
        step.log(measured(everything))
        if config.overlong.buffer:
            step.log({"shaped_reward": float(shaping(everything).mean())})
        if not num_updates:
            step.log({"loss": 0.0, "grad_norm": 0.0})
        step.log(
            {
                "reward_std": float(everything.rewards.std(correction=0)),
                "informative_groups": share,
                "groups_kept": share if config.dynamic_sampling else 1.0,
                "num_updates": float(num_updates),
            }
        )


def trained_tokens(
    config: GRPOConfig, rollouts: Rollouts, batch: TokenBatch
) -> Bool[Tensor, "batch seq"]:
    """Return the loss mask without truncated responses and without groups that dynamic sampling
    rejects (the last round's, where it found no other).
    """
    mask = batch.loss_mask
    if config.overlong.filter:
        mask = overlong_filter(mask, rollouts.truncated)
    if config.dynamic_sampling:
        mask = mask & informative_groups(rollouts.rewards, rollouts.group_id)[:, None]
    return mask


def teaches(config: GRPOConfig, batch: TokenBatch) -> bool:
    """Return whether the batch's loss has a gradient: an advantage, a KL penalty or an entropy
    bonus of a trained token.
    """
    assert batch.advantages is not None
    if config.kl.coef or config.entropy_coef:
        return bool(batch.loss_mask.any())
    return bool((batch.advantages != 0).any())


def roll_out(
    run: OpenRun, step: Step, prompts: PromptStream
) -> tuple[Rollouts, Rollouts, Bool[Tensor, "batch"]]:
    """Return the responses to train on, all that were sampled, and which are in informative groups.

    Dynamic sampling replaces groups whose rewards, before they are shaped, are all equal by fresh
    ones, in rounds. Where it finds no other, it returns the last round.
    """
    config = run.config
    kept: list[Rollouts] = []
    sampled: list[Rollouts] = []
    informative: list[Tensor] = []
    wanted, size = config.num_prompts_per_step, config.num_generations_per_prompt
    with run.sampling():
        for _ in range(config.max_sampling_rounds if config.dynamic_sampling else 1):
            sampled.append(step.sample(prompts.next(wanted), n=size))
            rewards, group_id = sampled[-1].rewards, sampled[-1].group_id
            informative.append(informative_groups(rewards, group_id))
            if not config.dynamic_sampling:
                break
            if informative[-1].any():
                kept.append(select(sampled[-1], informative[-1].nonzero()[:, 0].tolist()))
                wanted -= len(kept[-1]) // size
            if not wanted:
                break
    return join(kept or sampled[-1:]), join(sampled), torch.cat(informative)


def with_logprobs(run: OpenRun, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the logprobs that the loss compares."""
    config, trainer = run.config, run.trainer
    if config.needs_reference:
        reference = trainer.get_reference_logprobs(batch)
        values = of_this_batch(reference, batch, "reference_logprobs")
        batch = replace(batch, reference_logprobs=values)
    if updates_per_batch(config, len(batch)) > 1 or config.needs_kl_reward:
        batch = with_prev_logprobs(run, batch)
    return batch


def with_prev_logprobs(run: OpenRun, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the trainer's logprobs before the update."""
    logprobs = run.trainer.get_logprobs(batch)
    return replace(batch, prev_logprobs=of_this_batch(logprobs, batch, "prev_logprobs"))


def of_this_batch(logprobs: Logprobs, batch: TokenBatch, name: str) -> Float[Tensor, "batch seq"]:
    """Return the values of logprobs of the batch's temperature and filter."""
    require_same_support(logprobs.kind, batch.logprob_kind, what_a=name, what_b="the batch's")
    return logprobs.values


def compared_samples(
    run: OpenRun, rollouts: Rollouts, batch: TokenBatch, shaping: Shaping
) -> Samples:
    """Return groups for the sample log with the trainer's logprobs before the update, and with the
    rewards that are compared where shaping changes them.

    In a batch with `prev_logprobs` the response on which the sampler's differ most is among them.
    """
    groups = rollouts.group_id.tolist()
    rows = whole_groups(groups, run.config.run.samples_per_step)
    if not rows:
        return []
    if batch.prev_logprobs is not None and (worst := worst_row(batch)) not in rows:
        shown = {groups[row] for row in rows} - {groups[rows[-1]]} | {groups[worst]}
        rows = [row for row, group in enumerate(groups) if group in shown]
    part = trim(take(batch, rows))
    if part.prev_logprobs is None:
        part = with_prev_logprobs(run, part)
    compared = select(rollouts, rows)
    samples = samples_of(compared, part, len(rows))
    if run.config.overlong.buffer:
        shaped = shaping(compared).tolist()
        samples = [s | {"shaped_reward": x} for s, x in zip(samples, shaped, strict=True)]
    return [{**sample, "worst_tokens": worst_tokens(sample, run.tokenizer)} for sample in samples]


def worst_row(batch: TokenBatch) -> int:
    """Return the response on which sampler and trainer differ most."""
    assert batch.prev_logprobs is not None and batch.generation_logprobs is not None
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=torch.inf)
    return int(torch.where(batch.loss_mask, gap, 0.0).amax(-1).argmax())


def minibatches(num_responses: int, config: GRPOConfig, *, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each optimizer step on a rollout batch, in random order if several."""
    size = config.train_global_batch_size or num_responses
    for epoch in range(config.num_updates_per_batch):
        rows = torch.arange(num_responses)
        if size < num_responses:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            rows = torch.randperm(num_responses, generator=generator)
        yield from rows.tensor_split(-(-num_responses // size))


def updates_per_batch(config: GRPOConfig, num_responses: int) -> int:
    """Return the number of optimizer steps on a rollout batch."""
    size = config.train_global_batch_size or num_responses
    return config.num_updates_per_batch * -(-num_responses // size)

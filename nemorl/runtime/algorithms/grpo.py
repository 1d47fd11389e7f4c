"""GRPO and its relatives: sample groups of responses, and move towards the better ones."""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.data.packing import segments_apart
from nemorl.data.sources import set_names
from nemorl.rollout.collect import Rollouts, join, select, to_token_batch
from nemorl.runtime.algorithms.common import (
    by_segment,
    minibatches,
    of_this_batch,
    with_prev_logprobs,
)
from nemorl.runtime.algorithms.policy_loss import (
    Shaping,
    at_version,
    make_advantages,
    make_loss,
    make_loss_weights,
    make_shaping,
)
from nemorl.runtime.algorithms.receipts import TokenReceipt, read_at_once, with_receipts
from nemorl.runtime.config.grpo import GRPOConfig, nearest_preset
from nemorl.runtime.run.groups import GroupStream
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.receipts import Receipts
from nemorl.runtime.run.samples import (
    Samples,
    beside,
    by_set,
    compared,
    failures_of,
    informative,
    samples_of,
    whole_groups,
    worst_tokens,
)
from nemorl.runtime.watch.log import event


def grpo(run: Run[GRPOConfig]) -> None:
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
            for read, rows in read_at_once(learned):
                step.log(receipt.add(read, rows))
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
    """Print and log the nearest preset."""
    line = nearest_preset(config)
    event("preset", line)
    if config.run.display != "none":
        print(line)


def trained_rows(config: GRPOConfig, rollouts: Rollouts) -> Bool[Tensor, "batch"]:
    """Return which conversations are trained on."""
    kept = torch.ones(len(rollouts), dtype=torch.bool)
    if config.overlong.filter:
        kept &= ~rollouts.truncated
    if config.dynamic_sampling:
        kept &= informative(rollouts, config)
    return kept


def teaches(config: GRPOConfig, batch: TokenBatch) -> bool:
    """Return whether the batch's loss has a gradient."""
    assert batch.advantages is not None
    if config.kl.coef or config.entropy_coef or config.off_policy.penalty:
        return bool(batch.loss_mask.any())
    return bool((batch.advantages != 0).any())


def with_logprobs(run: Run[GRPOConfig], batch: TokenBatch) -> TokenBatch:
    """Add the logprobs that the loss compares."""
    config, trainer = run.config, run.trainer
    if config.needs_reference:
        reference = by_segment(trainer.get_reference_logprobs, batch)
        values = of_this_batch(reference, batch, "reference_logprobs")
        batch = replace(batch, reference_logprobs=values)
    several = config.updates_on(len(batch)) > 1 and not config.interpolates
    if several or config.needs_kl_reward:
        batch = with_prev_logprobs(run, batch)
    return batch


def roll_out(run: Run[GRPOConfig], groups: GroupStream) -> tuple[Rollouts, Rollouts]:
    """Return the responses to train on, and all that were sampled.

    Dynamic sampling replaces groups whose rewards, before they are shaped, are all equal
    (`informative`) by fresh ones, in rounds. Where it finds no other, it returns the last round.
    """
    config = run.config
    if not config.dynamic_sampling:
        everything = groups.next()
        return everything, everything
    kept: list[Rollouts] = []
    sampled: list[Rollouts] = []
    rejected: list[Rollouts] = []
    wanted = config.num_prompts_per_step
    with run.sampling():
        for _ in range(config.max_sampling_rounds):
            for each in rejected:
                groups.drop(each, "uninformative")
            sampled.append(groups.next(wanted))
            differing = informative(sampled[-1], config)
            rejected = [] if differing.all() else [part(sampled[-1], ~differing)]
            if differing.any():
                kept.append(part(sampled[-1], differing))
                wanted -= len(kept[-1].group_id.unique())
            if not wanted:
                break
    for each in rejected:
        groups.drop(each, "uninformative")
    everything = join(sampled)
    return replace(join(kept or sampled[-1:]), failed=everything.failed), everything


def part(rollouts: Rollouts, chosen: Bool[Tensor, "batch"]) -> Rollouts:
    """Return chosen responses."""
    return select(rollouts, chosen.nonzero()[:, 0].tolist())


def compared_samples(
    run: Run[GRPOConfig], rollouts: Rollouts, batch: TokenBatch, shaping: Shaping
) -> Samples:
    """Return groups for the sample log, among them that of `worst_row` where logprobs are known."""
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
    chosen = select(rollouts, rows)
    samples = samples_of(chosen, part, range(len(rows)))
    if run.config.overlong.buffer:
        shaped = shaping(chosen).tolist()
        samples = [s | {"shaped_reward": x} for s, x in zip(samples, shaped, strict=True)]
    samples = [{**s, "worst_tokens": worst_tokens(s, run.tokenizer)} for s in samples]
    return samples + failures_of(rollouts, run.config.run.samples_per_step)


def worst_row(batch: TokenBatch) -> int:
    """Return the response of the widest gap."""
    assert batch.prev_logprobs is not None and batch.generation_logprobs is not None
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=torch.inf)
    return int(torch.where(batch.loss_mask, gap, 0.0).amax(-1).argmax())

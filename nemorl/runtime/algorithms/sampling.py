"""What GRPO samples: groups of responses, in rounds where dynamic sampling rejects some, and those
that the sample log shows.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.rollout.collect import Rollouts, join, select
from nemorl.runtime.algorithms.common import with_prev_logprobs
from nemorl.runtime.algorithms.policy_loss import Shaping
from nemorl.runtime.run.groups import GroupStream
from nemorl.runtime.run.loop import OpenRun
from nemorl.runtime.run.samples import (
    Samples,
    failures_of,
    informative,
    samples_of,
    whole_groups,
    worst_tokens,
)


def roll_out(run: OpenRun, groups: GroupStream) -> tuple[Rollouts, Rollouts]:
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
    """Return the chosen responses."""
    return select(rollouts, chosen.nonzero()[:, 0].tolist())


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
    samples = samples_of(compared, part, range(len(rows)))
    if run.config.overlong.buffer:
        shaped = shaping(compared).tolist()
        samples = [s | {"shaped_reward": x} for s, x in zip(samples, shaped, strict=True)]
    samples = [{**s, "worst_tokens": worst_tokens(s, run.tokenizer)} for s in samples]
    return samples + failures_of(rollouts, run.config.run.samples_per_step)


def worst_row(batch: TokenBatch) -> int:
    """Return the response on which sampler and trainer differ most."""
    assert batch.prev_logprobs is not None and batch.generation_logprobs is not None
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=torch.inf)
    return int(torch.where(batch.loss_mask, gap, 0.0).amax(-1).argmax())

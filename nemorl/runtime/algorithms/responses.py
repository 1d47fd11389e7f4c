"""Which of a step's responses are trained on, what is computed of them, and the log."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.data.packing import pack, segments_apart
from nemorl.losses.logprobs import Logprobs, require_same_support
from nemorl.rollout.collect import Rollouts, join, select
from nemorl.rollout.random import derive_seed
from nemorl.runtime.algorithms.policy_loss import Shaping
from nemorl.runtime.config.grpo import GRPOConfig, OnlineConfig
from nemorl.runtime.run.loop import PromptStream, Run, Step
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


def trained_rows(config: OnlineConfig, rollouts: Rollouts) -> Bool[Tensor, "batch"]:
    """Return which conversations are trained on."""
    kept = torch.ones(len(rollouts), dtype=torch.bool)
    if config.overlong.filter:
        kept &= ~rollouts.truncated
    if isinstance(config, GRPOConfig) and config.dynamic_sampling:
        kept &= informative(rollouts, config)
    return kept


def teaches(config: OnlineConfig, batch: TokenBatch) -> bool:
    """Return whether the batch's loss has a gradient."""
    assert batch.advantages is not None
    if config.kl.coef or config.entropy_coef or config.off_policy.penalty:
        return bool(batch.loss_mask.any())
    return bool((batch.advantages != 0).any())


def with_logprobs(run: Run[OnlineConfig], batch: TokenBatch, *, several: bool) -> TokenBatch:
    """Add the logprobs that the loss compares. several: whether it gets several updates."""
    config, trainer = run.config, run.trainer
    if config.needs_reference:
        values = by_segment(trainer.get_reference_logprobs, batch, "reference_logprobs")
        batch = replace(batch, reference_logprobs=values)
    if (several and not config.interpolates) or config.needs_kl_reward:
        values = by_segment(trainer.get_logprobs, batch, "prev_logprobs")
        batch = replace(batch, prev_logprobs=values)
    return batch


def by_segment(
    compute: Callable[[TokenBatch], Logprobs | Tensor], batch: TokenBatch, name: str = ""
) -> Float[Tensor, "batch seq"]:
    """Return values, or logprobs of the batch's distribution, computed a segment a row."""
    apart, plan = segments_apart(replace(batch, sampled_hashes=None))
    found = compute(apart)
    if isinstance(found, Logprobs):
        require_same_support(found.kind, batch.logprob_kind, what_a=name, what_b="the batch's")
        found = found.values
    values = pack(replace(apart, values=found), plan).values
    assert values is not None
    return pad(values, (0, batch.input_ids.shape[1] - values.shape[1]))


def minibatches(num_responses: int, config: OnlineConfig, *, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each optimizer step, in random order if several."""
    size = config.train_global_batch_size or num_responses
    for epoch in range(config.num_updates_per_batch):
        rows = torch.arange(num_responses)
        if size < num_responses:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            rows = torch.randperm(num_responses, generator=generator)
        yield from rows.tensor_split(-(-num_responses // size))


def roll_out(run: Run[GRPOConfig], step: Step, prompts: PromptStream) -> tuple[Rollouts, Rollouts]:
    """Return the responses to train on, and all that were sampled.

    Dynamic sampling replaces groups that are not `informative`, before rewards are shaped, by fresh
    ones, in rounds. Where it finds no other, it returns the last round.
    """
    config, size = run.config, run.config.num_generations_per_prompt
    wanted = config.num_prompts_per_step
    if not config.dynamic_sampling:
        everything = step.sample(prompts, count=wanted, n=size)
        return everything, everything
    kept, sampled = list[Rollouts](), list[Rollouts]()
    with run.sampling():
        for _ in range(config.max_sampling_rounds):
            sampled.append(step.sample(prompts, count=wanted, n=size))
            differing = informative(sampled[-1], config)
            if not differing.all():
                step.drop(part(sampled[-1], ~differing), "uninformative")
            if differing.any():
                kept.append(part(sampled[-1], differing))
                wanted -= len(kept[-1].group_id.unique())
            if not wanted:
                break
    everything = join(sampled)
    return replace(join(kept or sampled[-1:]), failed=everything.failed), everything


def part(rollouts: Rollouts, chosen: Bool[Tensor, "batch"]) -> Rollouts:
    """Return chosen responses."""
    return select(rollouts, chosen.nonzero()[:, 0].tolist())


def measurements(
    run: Run[OnlineConfig], step: Step, rollouts: Rollouts, shaping: Shaping, *, updated: bool
) -> dict[str, float]:
    """Return what a step logs of its responses. updated: whether the policy was."""
    own = {"num_updates": float(step.updates)}
    if not updated:
        own |= {"loss": 0.0, "grad_norm": 0.0}
    if run.config.overlong.buffer:
        own["shaped_reward"] = float(shaping(rollouts).mean())
    return beside(own, compared(rollouts, run.config) | by_set(rollouts, run.train_sets))


def compared_samples(
    run: Run[OnlineConfig], rollouts: Rollouts, batch: TokenBatch, shaping: Shaping
) -> Samples:
    """Return groups for the sample log, with that of `worst_row` where logprobs are known."""
    groups = rollouts.group_id.tolist()
    rows = whole_groups(groups, run.config.run.samples_per_step)
    if not rows:
        return []
    if batch.prev_logprobs is not None and (worst := worst_row(batch)) not in rows:
        shown = {groups[row] for row in rows} - {groups[rows[-1]]} | {groups[worst]}
        rows = [row for row, group in enumerate(groups) if group in shown]
    part = trim(take(batch, rows))
    if part.prev_logprobs is None:
        values = by_segment(run.trainer.get_logprobs, part, "prev_logprobs")
        part = replace(part, prev_logprobs=values)
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

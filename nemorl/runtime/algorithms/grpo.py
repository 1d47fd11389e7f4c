"""GRPO and its relatives: sample groups of responses, and move towards the better ones."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.data.order import RowOrder
from nemorl.losses.logprobs import Logprobs, require_same_support
from nemorl.losses.rewards import informative_groups, overlong_filter
from nemorl.losses.types import Metrics, finalize, merge
from nemorl.parallel.backend import LossFn
from nemorl.rollout.collect import Prompts, Rollouts, collect, join, select, to_token_batch
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.random import derive_seed
from nemorl.runtime.algorithms.common import (
    Samples,
    Stopwatch,
    answering,
    loop,
    measured,
    ready_generator,
    row_order,
    samples_of,
    tokenised_prompts,
    whole_groups,
    worst_tokens,
)
from nemorl.runtime.algorithms.policy_loss import (
    Advantages,
    LossWeights,
    make_advantages,
    make_loss,
    make_loss_weights,
)
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.run.job import Inputs, Job
from nemorl.runtime.run.state import Run


def prepare(config: GRPOConfig, inputs: Inputs) -> Job:
    """Return the job of training on the prompts of `inputs`."""
    environment = inputs.environment
    assert environment is not None
    check_rows(environment, [*inputs.train, *inputs.validation])
    prompts, lengths = tokenised_prompts(config, inputs.train, inputs.tokenizer)
    held_out, held_out_lengths = tokenised_prompts(config, inputs.validation, inputs.tokenizer)
    order = row_order(config, prompts.rows)
    step = partial(
        train_step,
        environment=environment,
        prompts=prompts,
        order=order,
        advantages=make_advantages(config),
        loss_weights=make_loss_weights(config),
        loss_fn=make_loss(config),
    )
    responses = config.num_prompts_per_step * config.num_generations_per_prompt
    return Job(
        run=partial(
            loop,
            step=step,
            last_step=config.max_num_steps,
            num_rows=order.num_rows,
            validate=answering(config, environment, held_out),
        ),
        num_steps=config.max_num_steps,
        num_updates=config.max_num_steps * updates_per_batch(config, responses),
        keep_reference=config.needs_reference,
        generates=True,
        lengths={"train": lengths, "validation": held_out_lengths},
    )


def train_step(
    run: Run,
    *,
    environment: EnvironmentInterface,
    prompts: Prompts,
    order: RowOrder,
    advantages: Advantages,
    loss_weights: LossWeights,
    loss_fn: LossFn,
) -> tuple[Run, dict[str, float], Samples]:
    """Sample groups of responses, score them, compare them, and update the policy on them."""
    config, state, watch = run.config, run.state, Stopwatch()
    with watch("sync"):
        generator = ready_generator(run)
    with watch("generate"):
        rollouts, everything, informative = roll_out(run, environment, prompts, order)
    with watch("train"):
        generator.sleep()  # the trainer needs the memory of its cache
        batch = with_logprobs(run, to_token_batch(rollouts))
        if config.overlong.filter:
            mask = overlong_filter(batch.loss_mask, rollouts.truncated)
            batch = replace(batch, loss_mask=mask)
        batch = replace(batch, advantages=advantages(rollouts, batch))
        samples = compared_samples(run, rollouts, batch)
        updates: Metrics = {}
        for rows in minibatches(len(batch), config, seed=derive_seed(state.seed, state.step)):
            part = take(batch, rows)
            weights = loss_weights(part.loss_mask, rollouts.group_id[rows])
            part = replace(part, loss_weights=weights)
            updates = merge(updates, run.trainer.train_step(part, loss_fn))
        share = float(informative.float().mean())
        metrics = measured(everything) | {
            "reward_std": float(everything.rewards.std(correction=0)),
            "informative_groups": share,
            "groups_kept": share if config.dynamic_sampling else 1.0,
        }
        metrics |= {f"generation/{name}": value for name, value in generator.metrics().items()}
        metrics |= finalize(updates)
    num_tokens = sum(map(len, everything.prompts)) + int(everything.lengths.sum())
    run = replace(run, state=state.advance(rows=len(everything.group_id.unique())))
    return run, metrics | watch.metrics(num_tokens), samples


def roll_out(
    run: Run, environment: EnvironmentInterface, prompts: Prompts, order: RowOrder
) -> tuple[Rollouts, Rollouts, Bool[Tensor, "batch"]]:
    """Return the responses to train on, all that were sampled, and which are in informative groups.

    Dynamic sampling replaces groups whose rewards are all equal by fresh ones, in rounds. Where it
    finds no other, the last round is trained on, with advantages of 0.
    """
    config, state = run.config, run.state
    assert run.generator is not None
    sampling = replace(config.generation.sampling_params(), n=config.num_generations_per_prompt)
    kept: list[Rollouts] = []
    sampled: list[Rollouts] = []
    informative: list[Tensor] = []
    wanted, taken = config.num_prompts_per_step, 0
    for _ in range(config.max_sampling_rounds if config.dynamic_sampling else 1):
        fresh = collect(
            run.generator,
            environment,
            prompts.take(order.take(state.cursor + taken, wanted)),
            sampling,
            seed=derive_seed(state.seed, state.step),
            first_group=taken,
        )
        sampled.append(fresh)
        informative.append(informative_groups(fresh.rewards, fresh.group_id))
        if not config.dynamic_sampling:
            break
        taken += wanted
        if informative[-1].any():
            kept.append(select(fresh, informative[-1].nonzero()[:, 0].tolist()))
            wanted -= len(kept[-1]) // sampling.n
        if not wanted:
            break
    return join(kept or sampled[-1:]), join(sampled), torch.cat(informative)


def with_logprobs(run: Run, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the logprobs that the loss compares."""
    config, trainer = run.config, run.trainer
    if config.needs_reference:
        reference = trainer.get_reference_logprobs(batch)
        values = of_this_batch(reference, batch, "reference_logprobs")
        batch = replace(batch, reference_logprobs=values)
    if updates_per_batch(config, len(batch)) > 1 or config.needs_kl_reward:
        batch = with_prev_logprobs(run, batch)
    return batch


def with_prev_logprobs(run: Run, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the trainer's logprobs before the update."""
    logprobs = run.trainer.get_logprobs(batch)
    return replace(batch, prev_logprobs=of_this_batch(logprobs, batch, "prev_logprobs"))


def of_this_batch(logprobs: Logprobs, batch: TokenBatch, name: str) -> Float[Tensor, "batch seq"]:
    """Return the values of logprobs of the batch's temperature and filter."""
    require_same_support(logprobs.kind, batch.logprob_kind, what_a=name, what_b="the batch's")
    return logprobs.values


def compared_samples(run: Run, rollouts: Rollouts, batch: TokenBatch) -> Samples:
    """Return groups for the sample log with the trainer's logprobs before the update.

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
    samples = samples_of(select(rollouts, rows), part, len(rows))
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

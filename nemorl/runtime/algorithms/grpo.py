"""GRPO and its relatives: sample a group of responses per prompt, compare them with each other,
move the policy towards the better ones.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemorl.data.batch import TokenBatch, take, trim
from nemorl.data.order import RowOrder
from nemorl.losses import advantages as adv
from nemorl.losses import masks, policy
from nemorl.losses.importance import importance_weights, sampler_gap
from nemorl.losses.logprobs import Logprobs, require_same_support
from nemorl.losses.masked import mean_of
from nemorl.losses.rewards import informative_groups, overlong_filter, overlong_penalty
from nemorl.losses.terms import entropy_bonus, kl_loss
from nemorl.losses.types import LossOutput, Metrics, finalize, merge
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.rollout.collect import Prompts, Rollouts, collect, join, select, to_token_batch
from nemorl.rollout.environment import EnvironmentInterface, check_rows
from nemorl.rollout.random import derive_seed
from nemorl.runtime.algorithms.common import (
    Samples,
    Validate,
    answering,
    loop,
    ready_generator,
    row_order,
    samples_of,
    spread,
    tokenised_prompts,
    worst_tokens,
)
from nemorl.runtime.config.base import GRPOConfig
from nemorl.runtime.config.policy import (
    CISPOLoss,
    ClippedLoss,
    GSPOLoss,
    ReinforcePlusPlusAdvantage,
)
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.job import Inputs, Job
from nemorl.runtime.run.state import Run


def prepare(config: GRPOConfig, inputs: Inputs) -> Job:
    """The prompts as tokens, and what the loop needs besides."""
    environment, rows = inputs.environment, [*inputs.train, *inputs.validation]
    assert environment is not None
    check_rows(environment, rows)
    prompts, lengths = tokenised_prompts(config, inputs.train, inputs.tokenizer)
    held_out, held_out_lengths = tokenised_prompts(config, inputs.validation, inputs.tokenizer)
    order = row_order(config, prompts.rows)
    return Job(
        run=partial(
            run,
            environment=environment,
            prompts=prompts,
            order=order,
            validate=answering(config, environment, held_out),
        ),
        num_steps=config.max_num_steps,
        num_updates=config.max_num_steps
        * updates_per_batch(
            config, config.num_prompts_per_step * config.num_generations_per_prompt
        ),
        keep_reference=config.needs_reference,
        generates=True,
        lengths={"train": lengths, "validation": held_out_lengths},
    )


def run(
    run: Run,
    environment: EnvironmentInterface,
    prompts: Prompts,
    order: RowOrder,
    *,
    validate: Validate | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train until `max_num_steps`; returns the run as it stands then."""
    step = partial(
        train_step,
        environment=environment,
        prompts=prompts,
        order=order,
        loss_fn=make_loss(run.config),
    )
    return loop(
        run,
        step,
        last_step=run.config.max_num_steps,
        num_rows=order.num_rows,
        validate=validate,
        callbacks=callbacks,
    )


def train_step(
    run: Run,
    *,
    environment: EnvironmentInterface,
    prompts: Prompts,
    order: RowOrder,
    loss_fn: LossFn,
) -> tuple[Run, dict[str, float], Samples]:
    """Sample groups of responses, judge them, compare them within their groups, and update the
    policy on the batch.
    """
    config, trainer, start = run.config, run.trainer, time.perf_counter()
    generator = ready_generator(run)
    synced = time.perf_counter()
    rollouts, everything = roll_out(run, environment, prompts, order)
    generated = time.perf_counter()
    generator.sleep()  # the cache's memory is the trainer's for now
    batch = batch_of(run, rollouts)
    samples = compared_samples(run, rollouts, batch)
    measured: Metrics = {}
    for minibatch in minibatches(
        batch, rollouts, config, seed=derive_seed(run.state.seed, run.state.step)
    ):
        measured = merge(measured, trainer.train_step(minibatch, loss_fn))
    run = replace(run, state=run.state.advance(rows=num_groups(everything)))
    metrics = rollout_metrics(everything) | {
        f"generation/{name}": value for name, value in generator.metrics().items()
    }
    # Where no group was informative, the last round is trained on all the same (its advantages are
    # 0), but none of it was worth keeping.
    metrics["groups_kept"] = metrics["informative_groups"] if config.dynamic_sampling else 1.0
    metrics |= finalize(measured)
    return run, metrics | timing(start, synced, generated, everything), samples


def roll_out(
    run: Run, environment: EnvironmentInterface, prompts: Prompts, order: RowOrder
) -> tuple[Rollouts, Rollouts]:
    """The groups to train on, and all that were sampled.

    Dynamic sampling replaces groups whose rewards are all equal by fresh ones, in rounds.
    """
    config, state = run.config, run.state
    assert run.generator is not None
    sampling = replace(config.generation.sampling_params(), n=config.num_generations_per_prompt)
    kept: list[Rollouts] = []
    sampled: list[Rollouts] = []
    wanted, taken = config.num_prompts_per_step, 0
    for _ in range(config.max_sampling_rounds if config.dynamic_sampling else 1):
        rows = order.take(state.cursor + taken, wanted)
        fresh = collect(
            run.generator,
            environment,
            prompts.take(rows),
            sampling,
            seed=derive_seed(state.seed, state.step),
            first_group=taken,
        )
        sampled.append(fresh)
        taken += wanted
        informative = (
            informative_groups(fresh.rewards, fresh.group_id)
            if config.dynamic_sampling
            else torch.ones(len(fresh), dtype=torch.bool)
        )
        if informative.any():
            kept.append(select(fresh, informative.nonzero()[:, 0].tolist()))
            wanted -= len(kept[-1]) // sampling.n
        if not wanted:
            break
    return join(kept or [fresh]), join(sampled)


def batch_of(run: Run, rollouts: Rollouts) -> TokenBatch:
    """The rollouts as a batch with advantages, and with the logprobs of the policies that the loss
    compares.
    """
    config: GRPOConfig = run.config
    batch = to_token_batch(rollouts)
    if config.needs_reference:
        batch = replace(
            batch,
            reference_logprobs=of_this_batch(
                run.trainer.get_reference_logprobs(batch), batch, "reference_logprobs"
            ),
        )
    if updates_per_batch(config, len(batch)) > 1 or needs_kl_reward(config):
        batch = replace(
            batch,
            prev_logprobs=of_this_batch(run.trainer.get_logprobs(batch), batch, "prev_logprobs"),
        )
    if config.overlong.filter:
        batch = replace(batch, loss_mask=overlong_filter(batch.loss_mask, rollouts.truncated))
    return replace(batch, advantages=advantages(config, rollouts, batch))


def compared_samples(run: Run, rollouts: Rollouts, batch: TokenBatch) -> Samples:
    """Responses for the sample log, with the trainer's logprobs of their tokens before the update,
    and the tokens where the sampler's differ most.

    Of a batch that has these logprobs, the response with the worst token of all is among them. Of
    another they cost a forward pass of these few.
    """
    rows = spread(len(batch), run.config.run.samples_per_step)
    if not rows:
        return []
    if batch.prev_logprobs is not None and (worst := worst_row(batch)) not in rows:
        rows = sorted([*rows[:-1], worst])
    part = trim(take(batch, rows))
    if part.prev_logprobs is None:
        part = replace(
            part, prev_logprobs=of_this_batch(run.trainer.get_logprobs(part), part, "prev_logprobs")
        )
    samples = samples_of(select(rollouts, rows), part, len(rows))
    return [{**sample, "worst_tokens": worst_tokens(sample, run.tokenizer)} for sample in samples]


def worst_row(batch: TokenBatch) -> int:
    """The response with the trained token on which sampler and trainer differ most."""
    assert batch.prev_logprobs is not None and batch.generation_logprobs is not None
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=torch.inf)
    return int(torch.where(batch.loss_mask, gap, 0.0).amax(-1).argmax())


def of_this_batch(logprobs: Logprobs, batch: TokenBatch, name: str) -> Float[Tensor, "batch seq"]:
    """The values of log-probabilities that can be compared with the batch's; LogprobKindError if
    they are of another temperature or filter.
    """
    require_same_support(logprobs.kind, batch.logprob_kind, what_a=name, what_b="the batch's")
    return logprobs.values


def advantages(
    config: GRPOConfig, rollouts: Rollouts, batch: TokenBatch
) -> Float[Tensor, "batch seq"]:
    """Per token, from the rewards as shaped by length."""
    rewards = rollouts.rewards
    if config.overlong.buffer:
        limit = config.generation.longest_response
        buffer = max(1, round(config.overlong.buffer * limit))
        rewards = rewards + overlong_penalty(
            rollouts.lengths, max_length=limit, buffer=buffer, penalty=config.overlong.penalty
        )
    choice = config.advantage
    if isinstance(choice, ReinforcePlusPlusAdvantage):
        kl = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
        if choice.kl_coef:
            assert batch.prev_logprobs is not None and batch.reference_logprobs is not None
            kl = torch.where(batch.loss_mask, batch.prev_logprobs - batch.reference_logprobs, 0.0)
        group_id = rollouts.group_id if choice.group_baseline else None
        return adv.reinforce_plus_plus(
            rewards, kl, batch.loss_mask, kl_coef=choice.kl_coef, group_id=group_id
        )
    lengths = rollouts.lengths if choice.baseline == "length_weighted" else None
    per_response = adv.advantages(
        rewards,
        rollouts.group_id,
        baseline=choice.baseline,
        scale=choice.scale,
        ddof=choice.ddof,
        lengths=lengths,
    )
    return adv.to_tokens(per_response, batch.loss_mask)


def minibatches(
    batch: TokenBatch, rollouts: Rollouts, config: GRPOConfig, *, seed: int
) -> Iterator[TokenBatch]:
    """The batch in optimizer steps, each with the loss weights of its own tokens; in a new random
    order for each pass if there are several steps.
    """
    size = config.train_global_batch_size or len(batch)
    for epoch in range(config.num_updates_per_batch):
        rows = torch.arange(len(batch))
        if size < len(batch):
            rows = torch.randperm(
                len(batch), generator=torch.Generator().manual_seed(derive_seed(seed, epoch))
            )
        for part in rows.tensor_split(-(-len(batch) // size)):
            minibatch = take(batch, part)
            yield replace(
                minibatch,
                loss_weights=loss_weights(minibatch.loss_mask, rollouts.group_id[part], config),
            )


def loss_weights(
    mask: Bool[Tensor, "batch seq"], group_id: Tensor, config: GRPOConfig
) -> Float[Tensor, "batch seq"]:
    match config.reduction:
        case "token_mean":
            return masks.token_mean_weights(mask)
        case "sequence_mean":
            return masks.sequence_mean_weights(mask)
        case "constant":
            return masks.constant_weights(mask, length=config.generation.longest_response)
        case "group_mean":
            return masks.group_mean_weights(mask, group_id)


def make_loss(config: GRPOConfig) -> LossFn:
    """The configured loss, as a function of what the model says about a part of the batch: one that
    can be sent to other processes.
    """
    return partial(policy_loss, config=config)


def policy_loss(output: ForwardOutput, batch: TokenBatch, *, config: GRPOConfig) -> LossOutput:
    """The policy's term with its optional ones."""
    assert (
        batch.advantages is not None
        and batch.loss_weights is not None
        and batch.generation_logprobs is not None
    )
    logprobs, weights, mask = output.token_logprobs, batch.loss_weights, batch.loss_weights != 0
    # Without prev_logprobs this is the only update on the batch, so the policy is its own
    # predecessor.
    prev = policy.on_policy(logprobs) if batch.prev_logprobs is None else batch.prev_logprobs
    metrics = merge(
        sampler_gap(prev, batch.generation_logprobs, mask, batch.segment_ids),
        {"entropy": mean_of(output.entropy, mask)},
    )
    importance = None
    if config.off_policy.mode != "none":
        bounds: dict[str, Any] = {
            "level": config.off_policy.level,
            "min": config.off_policy.min,
            "max": config.off_policy.max,
        }
        importance, more = importance_weights(
            prev,
            batch.generation_logprobs,
            mask,
            batch.segment_ids,
            mode=config.off_policy.mode,
            **bounds,
        )
        metrics = merge(metrics, more)
    result = policy_term(config, logprobs, prev, batch, importance)
    if config.kl.coef:
        assert batch.reference_logprobs is not None
        sampled = batch.generation_logprobs if config.kl.gradient == "importance" else None
        options: dict[str, Any] = {
            "coef": config.kl.coef,
            "estimator": config.kl.estimator,
            "gradient": config.kl.gradient,
        }
        result += kl_loss(logprobs, batch.reference_logprobs, weights, sampled, **options)
    if config.entropy_coef:
        result = replace(
            result,
            loss=result.loss
            + entropy_bonus(output.entropy, weights, coef=config.entropy_coef).loss,
        )
    return replace(result, metrics=merge(metrics, result.metrics))


def policy_term(
    config: GRPOConfig, logprobs: Tensor, prev: Tensor, batch: TokenBatch, importance: Tensor | None
) -> LossOutput:
    assert batch.advantages is not None and batch.loss_weights is not None
    data = (logprobs, prev, batch.advantages, batch.loss_weights)
    match config.loss:
        case ClippedLoss(clip_low=low, clip_high=high, dual_clip=dual):
            return policy.clipped(*data, importance, clip_low=low, clip_high=high, dual_clip=dual)
        case GSPOLoss(clip_low=low, clip_high=high, token_gradient=token_gradient):
            return (policy.gspo_token if token_gradient else policy.gspo)(
                *data, batch.segment_ids, importance, clip_low=low, clip_high=high
            )
        case CISPOLoss(clip_low=low, clip_high=high):
            return policy.cispo(*data, importance, clip_low=low, clip_high=high)
        case _:
            return policy.reinforce(*data, importance)


def updates_per_batch(config: GRPOConfig, num_responses: int) -> int:
    """Optimizer steps that a rollout batch gives."""
    return config.num_updates_per_batch * -(
        -num_responses // (config.train_global_batch_size or num_responses)
    )


def needs_kl_reward(config: GRPOConfig) -> bool:
    return isinstance(config.advantage, ReinforcePlusPlusAdvantage) and config.advantage.kl_coef > 0


def num_groups(rollouts: Rollouts) -> int:
    """How many prompts the responses answer."""
    return len(rollouts.group_id.unique())


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    return {
        **rollouts.metrics,
        **rollouts.reward_metrics(),
        "reward_std": float(rollouts.rewards.std(correction=0)),
        "response_length": float(rollouts.lengths.float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
        "informative_groups": float(
            informative_groups(rollouts.rewards, rollouts.group_id).float().mean()
        ),
    }


def timing(start: float, synced: float, generated: float, rollouts: Rollouts) -> dict[str, float]:
    now = time.perf_counter()
    tokens = sum(len(prompt) for prompt in rollouts.prompts) + int(rollouts.lengths.sum())
    return {
        "seconds": now - start,
        "seconds_sync": synced - start,
        "seconds_generate": generated - synced,
        "seconds_train": now - generated,
        "tokens_per_second": tokens / (now - start),
    }

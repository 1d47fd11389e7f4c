"""The loss of a policy, with its weights and advantages. `make_…` is called once in a run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemorl.checks import short
from nemorl.data.batch import TokenBatch
from nemorl.losses import (
    LossOutput,
    entropy_bonus,
    importance_weights,
    interpolated_logprobs,
    kl_loss,
    log_ratio_penalty,
    masks,
    merge,
    needs,
    overlong_penalty,
    policy,
    sampler_gap,
)
from nemorl.losses import advantages as adv
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.rollout.calls import name_of
from nemorl.rollout.collect import Rollouts, turn_numbers, turn_returns
from nemorl.runtime.config import grpo
from nemorl.runtime.config.distill import DistillConfig
from nemorl.runtime.config.tree import settings_of

LossWeights = Callable[[Bool[Tensor, "batch seq"], Int[Tensor, "batch"]], Tensor]
"""Weights per token from the loss mask and the responses' groups."""
Advantages = Callable[[Rollouts, TokenBatch], Tensor]
"""Advantages per token."""
Shaping = Callable[[Rollouts], Float[Tensor, "batch"]]
"""The rewards that are compared."""


def make_loss_weights(config: grpo.OnlineConfig) -> LossWeights:
    """Return the function that weights tokens."""
    match config.reduction:
        case "token_mean":
            return lambda mask, group_id: masks.token_mean_weights(mask)
        case "sequence_mean":
            return lambda mask, group_id: masks.sequence_mean_weights(mask)
        case "constant":
            length = config.generation.longest_response
            return lambda mask, group_id: masks.constant_weights(mask, length=length)
        case "group_mean":
            return masks.group_mean_weights


def make_shaping(config: grpo.OnlineConfig) -> Shaping:
    """Return the function that shapes rewards by length."""
    overlong, limit = config.overlong, config.generation.longest_response
    if not overlong.buffer:
        return lambda rollouts: rollouts.rewards
    buffer = max(1, round(overlong.buffer * limit))
    return lambda rollouts: (
        rollouts.rewards
        + overlong_penalty(
            rollouts.longest_responses, max_length=limit, buffer=buffer, penalty=overlong.penalty
        )
    )


def make_advantages(config: grpo.GRPOConfig | DistillConfig) -> Advantages:
    """Return the function that turns rewards into advantages."""
    choice, shaped = config.advantage, make_shaping(config)

    def advantages(rollouts: Rollouts, batch: TokenBatch) -> Float[Tensor, "batch seq"]:
        rewards, group_id, mask = shaped(rollouts), rollouts.group_id, batch.loss_mask
        if isinstance(choice, grpo.GroupAdvantage):
            if choice.level == "turn":
                rewards, group_id = turn_returns(rollouts, discount=config.rollout.discount)
            per_response = adv.advantages(
                rewards,
                group_id,
                baseline=choice.baseline,
                scale=choice.scale,
                ddof=choice.ddof,
                lengths=rollouts.lengths if choice.baseline == "length_weighted" else None,
            )
            if choice.level == "turn":
                turns = turn_numbers(rollouts, batch)
                return adv.to_turns(per_response, turns, mask, rollouts.num_turns)
            return adv.to_tokens(per_response, mask)
        if isinstance(choice, grpo.PassAtKAdvantage):
            return adv.to_tokens(adv.pass_at_k(rewards, group_id, k=choice.k), mask)
        if isinstance(choice, grpo.OwnAdvantage):
            extra = {"lengths": rollouts.lengths, "loss_mask": mask}
            given = {name: extra[name] for name in choice.takes}
            found = choice.function(rewards, group_id, **given, **settings_of(choice))
            return _per_token(found, mask, choice.name)
        kl, groups = reference_kl(batch), group_id if choice.group_baseline else None
        return adv.reinforce_plus_plus(
            rewards, kl, mask, kl_coef=choice.kl_coef, group_id=groups, ddof=choice.ddof
        )

    return advantages


def reference_kl(batch: TokenBatch) -> Float[Tensor, "batch seq"]:
    """Return log π_prev − log π_ref of trained tokens; 0 of others, and where one is not known."""
    if batch.prev_logprobs is None or batch.reference_logprobs is None:
        return torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    return torch.where(batch.loss_mask, batch.prev_logprobs - batch.reference_logprobs, 0.0)


def _per_token(found: Any, mask: Bool[Tensor, "batch seq"], name: str) -> Tensor:
    if not isinstance(found, Tensor) or found.shape not in (mask.shape, mask.shape[:1]):
        what = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else short(found)
        raise ValueError(
            f"advantage {name} must return a tensor of shape {tuple(mask.shape[:1])}, one per"
            f" response, or {tuple(mask.shape)}, one per token, but it returned one {what}"
        )
    return adv.to_tokens(found, mask) if found.ndim == 1 else torch.where(mask, found, 0.0)


def make_loss(config: grpo.OnlineConfig) -> LossFn:
    """Return the configured loss of a part of a batch."""
    constants, off_policy, kl = settings_of(config.loss), config.off_policy, config.kl
    own = isinstance(config.loss, grpo.OwnLoss) and config.loss.function
    term = own or getattr(policy, config.loss.name)
    weights = asdict(off_policy) | {"mode": config.off_policy_mode}
    penalty, _ = weights.pop("penalty"), weights.pop("proximal")
    return policy_loss(
        term,
        off_policy=weights if config.off_policy_mode != "none" else None,
        interpolate=config.interpolates,
        penalty=penalty,
        kl=asdict(kl) if kl.coef else None,
        entropy_coef=config.entropy_coef,
        **constants,
    )


def policy_loss(
    term: Callable[..., LossOutput],
    *,
    off_policy: Mapping[str, Any] | None = None,
    interpolate: bool = False,
    penalty: float = 0.0,
    kl: Mapping[str, Any] | None = None,
    entropy_coef: float | None = 0.0,
    **constants: Any,
) -> LossFn:
    """Return the loss policy term + KL penalty − entropy bonus of a batch with `advantages`,
    `loss_weights` and `generation_logprobs`.

    term: term(token_logprobs, prev_logprobs, advantages, loss_weights, **constants) -> LossOutput
    or the loss alone, as in `nemorl.losses.policy`; it gets segment_ids if it names them.
    off_policy, kl: keywords of `importance_weights` (`by_advantage` False: without advantages) and
    `kl_loss`. interpolate: `prev_logprobs` that the batch lacks are `interpolated_logprobs`, by
    what `at_version` says; otherwise the present ones. penalty: coef of `log_ratio_penalty`.
    entropy_coef: 0 only reports the entropy; with None it is not computed.

    Raises: TypeError for constants that do not fit `term`.

    >>> loss_fn = policy_loss(policy.clipped, clip_low=0.2, clip_high=0.28)
    """
    by_sequence = "segment_ids" in signature(term).parameters
    computed = ["segment_ids"] * by_sequence + ["importance_weights"] * (off_policy is not None)
    try:
        signature(term).bind(*range(4), **dict.fromkeys(computed), **constants)
    except TypeError as error:
        raise TypeError(
            f"policy_loss must call {name_of(term)} with four tensors and the constants"
            f" {sorted(constants)}, but {error}: its parameters are"
            f" {', '.join(signature(term).parameters)}"
        ) from None
    loss_fn = partial(
        _policy_loss,
        term=partial(term, **constants),
        by_sequence=by_sequence,
        off_policy=off_policy,
        interpolate=interpolate,
        penalty=penalty,
        kl=kl,
        entropy_coef=entropy_coef,
    )
    return needs(entropy=entropy_coef is not None)(loss_fn)


def at_version(loss_fn: LossFn, *, version: int, present: int) -> LossFn:
    """Return the loss of one optimizer step, of a loss of `policy_loss` with interpolate.

    version: of π_prev: the trainer's `step` before the first update on the rollout batch.
    present: its step now, which differs from one minibatch to the next.

    >>> loss_fn = policy_loss(policy.clipped, off_policy={"max": 5.0}, interpolate=True)
    >>> of_second_minibatch = at_version(loss_fn, version=7, present=8)
    """
    of_step: Callable[..., LossOutput] = loss_fn
    return partial(of_step, version=version, progress=present - version)


def _policy_loss(
    output: ForwardOutput,
    batch: TokenBatch,
    *,
    term: Callable[..., LossOutput],
    by_sequence: bool,
    off_policy: Mapping[str, Any] | None,
    interpolate: bool,
    penalty: float,
    kl: Mapping[str, Any] | None,
    entropy_coef: float | None,
    version: int | None = None,
    progress: int = 0,
) -> LossOutput:
    assert batch.advantages is not None and batch.loss_weights is not None
    assert batch.generation_logprobs is not None
    logprobs, sampled = output.token_logprobs, batch.generation_logprobs
    weights, segments = batch.loss_weights, batch.segment_ids
    mask = weights != 0
    before: Tensor | None
    if batch.prev_logprobs is not None:
        prev = before = batch.prev_logprobs
    elif interpolate:
        prev = _interpolated(logprobs, sampled, batch.policy_versions, version, progress)
        # In part the sampler's own: they tell nothing of it. The present ones do, until an update.
        before = None if progress else logprobs
    else:  # the only update on the batch: the policy precedes itself
        prev = before = policy.on_policy(logprobs)
    metrics = {} if before is None else sampler_gap(before, sampled, mask, segments)
    options = {"segment_ids": segments} if by_sequence else {}
    if off_policy is not None:
        importance, measured = importance_weights(
            prev, sampled, mask, segments, batch.advantages, **off_policy
        )
        options["importance_weights"] = importance
        metrics = merge(metrics, measured)
    result = _as_output(term(logprobs, prev, batch.advantages, weights, **options))
    if logprobs.requires_grad and not result.loss.requires_grad:
        raise ValueError(
            "a loss must have a gradient with respect to token_logprobs, but it returned a"
            " constant: remove .detach(), .item() or torch.no_grad()"
        )
    if penalty:
        result += log_ratio_penalty(logprobs, sampled, weights, coef=penalty)
    if kl is not None:
        assert batch.reference_logprobs is not None
        drawn_from = sampled if kl["gradient"] == "importance" else None
        result += kl_loss(logprobs, batch.reference_logprobs, weights, drawn_from, **kl)
    if entropy_coef is not None:
        bonus = entropy_bonus(output.entropy, weights, coef=entropy_coef)
        metrics = merge(metrics, bonus.metrics)
        result = replace(result, loss=result.loss + bonus.loss) if entropy_coef else result
    return replace(result, metrics=merge(metrics, result.metrics))


def _interpolated(
    logprobs: Tensor, sampled: Tensor, versions: Tensor | None, version: int | None, progress: int
) -> Tensor:
    if versions is None:
        raise ValueError(
            "off_policy.proximal must be recompute where completions have no policy_versions, as"
            " this engine's, but it is 'interpolate': use recompute"
        )
    if version is None:
        raise ValueError(
            "a loss that interpolates must be given versions, but it has none: pass"
            " nemorl.at_version(loss_fn, version=…, present=…) to each train_step"
        )
    return interpolated_logprobs(
        logprobs, sampled, versions, version=version, progress=float(progress)
    )


def _as_output(result: Any) -> LossOutput:
    if isinstance(result, LossOutput):
        return result
    if isinstance(result, Tensor) and result.ndim == 0:
        return LossOutput(result, {})
    what = (
        f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
    )
    raise ValueError(
        f"a loss must return a scalar tensor or a LossOutput, but it returned {what}: sum the terms"
        " over all tokens, multiplied by loss_weights"
    )

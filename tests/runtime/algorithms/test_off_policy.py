"""Corrections for stale samples in a run: which one `auto` is, what the loss gets of the settings,
and an interpolated proximal policy, which saves a forward pass.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nemorl
from nemorl.losses import clipped, importance_weights, interpolated_logprobs, log_ratio_penalty
from nemorl.losses.types import LossOutput, finalize, needs_of
from nemorl.parallel.backend import ForwardOutput
from nemorl.rollout.conversation import Turn
from nemorl.runtime.algorithms import responses
from nemorl.runtime.algorithms.policy_loss import make_loss
from nemorl.runtime.config.grpo import PRESETS, OffPolicyConfig, OwnLoss, preset
from nemorl.runtime.config.tree import section_of
from tests.runtime.runs import ahead, grpo_config, numbers, rollouts, start


def at(staleness: int, **settings: Any) -> nemorl.GRPOConfig:
    return nemorl.GRPOConfig(async_=nemorl.AsyncConfig(max_staleness=staleness), **settings)


def without_weights(token_logprobs, prev_logprobs, advantages, loss_weights):
    return -(advantages * loss_weights * token_logprobs).sum()


def with_weights(token_logprobs, prev_logprobs, advantages, loss_weights, importance_weights=None):
    """With a metric of how many weights it got."""
    assert importance_weights is not None
    return clipped(token_logprobs, prev_logprobs, advantages, loss_weights, importance_weights)


def own(function: Any) -> Any:
    return section_of(OwnLoss, "mine", function, "loss")()


def test_auto_corrects_where_samples_may_be_stale():
    assert nemorl.GRPOConfig().off_policy.mode == "auto"
    assert nemorl.GRPOConfig().off_policy_mode == "none"
    assert {preset(name).off_policy_mode for name in PRESETS} == {"none"}
    assert [at(k).off_policy_mode for k in (0, 1, 4)] == ["none", "truncate", "truncate"]
    for mode in ("none", "truncate", "mask", "sequence_mask"):
        chosen = OffPolicyConfig(mode=mode)
        assert [at(k, off_policy=chosen).off_policy_mode for k in (0, 1)] == [mode] * 2


def stale_batch() -> nemorl.TokenBatch:
    """Three responses of four tokens, by the versions 3, 4, 5, 6."""
    one = rollouts([1.0, 0.0, 0.0], lengths=[4, 4, 4], group=3)
    sampled = ((-1.0, -1.5, -2.0, -0.5), (-1.6, -1.5, -1.7, -1.4), (-0.6, -0.9, -1.5, -1.0))
    changed = []
    for each, logprobs in zip(one.conversations, sampled, strict=True):
        versions = (3, 4, 5, 6)
        completion = replace(each.turns[0].completion, policy_versions=versions, logprobs=logprobs)
        changed.append(replace(each, turns=(Turn(prompt=[3, 4], completion=completion),)))
    batch = replace(one, conversations=changed).to_batch()
    weights = batch.loss_mask / batch.loss_mask.sum()
    advantages = torch.where(batch.loss_mask, torch.tensor([[1.0], [-0.5], [-0.5]]), 0.0)
    return replace(batch, advantages=advantages, loss_weights=weights)


def run(loss_fn: Any, batch: nemorl.TokenBatch, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the gradient and the metrics with "loss" at logprobs of -1."""
    now = torch.full_like(batch.loss_weights, -1.0).requires_grad_()
    output = loss_fn(ForwardOutput(now, torch.ones_like(now)), batch, **options)
    (gradient,) = torch.autograd.grad(output.loss, now)
    return gradient, finalize(output.metrics) | {"loss": output.loss.item()}


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_loss_is_corrected_from_one_batch_of_staleness_on(staleness: int):
    batch = stale_batch()
    gradient, metrics = run(make_loss(at(staleness)), batch)
    explicit = OffPolicyConfig(mode="truncate" if staleness else "none")
    expected, others = run(make_loss(nemorl.GRPOConfig(off_policy=explicit)), batch)
    assert torch.equal(gradient, expected) and metrics == others
    assert ("importance_weight_mean" in metrics) == (staleness > 0)


SECTIONS = [
    {"mode": "truncate", "max": 1.5},
    {"mode": "mask", "level": "geometric", "min": 0.5, "max": 5.0},
    {"mode": "truncate", "token_bounds": (0.8, 2.0)},
    {"mode": "truncate", "extreme_bounds": (0.5, 2.0)},
    {"mode": "truncate", "geometric_bounds": (0.5, 1.5)},
    {"mode": "truncate", "probability_bounds": (0.1, 0.1)},
    {"mode": "truncate", "binary_kl_bounds": (0.01, 0.01)},
    {"mode": "truncate", "mean_binary_kl": 0.1},
    {"mode": "truncate", "penalty": 0.1},
    {"mode": "none", "penalty": 0.1},
]


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_each_setting_reaches_the_loss(section: dict[str, Any]):
    batch, chosen = stale_batch(), OffPolicyConfig(**section)
    gradient, metrics = run(make_loss(nemorl.GRPOConfig(off_policy=chosen)), batch)

    def plainly(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
        now, sampled, weights = output.token_logprobs, batch.generation_logprobs, batch.loss_weights
        options = asdict(chosen)
        penalty, _ = (options.pop(name) for name in ("penalty", "proximal"))
        v = None
        if chosen.mode != "none":
            v, _ = importance_weights(
                now, sampled, batch.loss_mask, batch.segment_ids, batch.advantages, **options
            )
        loss = clipped(now, now.detach(), batch.advantages, weights, v)
        return loss + log_ratio_penalty(now, sampled, weights, coef=penalty)

    expected, others = run(plainly, batch)
    assert torch.equal(gradient, expected)
    assert metrics["loss"] == pytest.approx(others["loss"], rel=1e-6)
    assert ("log_ratio_squared" in metrics) == (chosen.penalty > 0)


def test_a_loss_of_the_users_gets_the_weights_or_is_refused():
    assert at(1, loss=own(with_weights)).off_policy_mode == "truncate"
    run(make_loss(at(1, loss=own(with_weights))), stale_batch())
    assert at(0, loss=own(without_weights)).off_policy_mode == "none"
    at(1, loss=own(without_weights), off_policy=OffPolicyConfig(mode="none"))
    message = r"^off_policy\.mode must be none for the loss mine, which has no parameter"
    with pytest.raises(ValueError, match=message):
        at(1, loss=own(without_weights))


@pytest.mark.parametrize(
    ("section", "others", "message"),
    [
        (
            {"mode": "mask", "token_bounds": (2.0, 0.5)},
            {},
            r"^off_policy\.token_bounds must be two numbers, the first at least 0 and below",
        ),
        (
            {"mode": "mask", "binary_kl_bounds": (0.1, -1.0)},
            {},
            "binary_kl_bounds must be two numbers",
        ),
        ({"mean_binary_kl": 0.1}, {}, r"^off_policy\.mean_binary_kl needs off_policy\.mode"),
        ({}, {"advantage": nemorl.PassAtKAdvantage(k=9)}, r"^advantage\.k must be .*use up to 8"),
        (
            {"proximal": "interpolate"},
            {"advantage": nemorl.ReinforcePlusPlusAdvantage(kl_coef=0.1)},
            r"^off_policy\.proximal must be recompute with advantage\.kl_coef above 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(section, others, message):
    with pytest.raises(ValueError, match=message):
        nemorl.GRPOConfig(off_policy=OffPolicyConfig(**section), **others)


INTERPOLATED = {"mode": "mask", "max": 5.0, "proximal": "interpolate"}
TWICE = {"num_updates_per_batch": 2}


def test_the_proximal_policy_of_each_minibatch_lies_between_sampler_and_present():
    batch = stale_batch()
    config = nemorl.GRPOConfig(off_policy=OffPolicyConfig(**INTERPOLATED), **TWICE)
    loss_fn = make_loss(config)
    for present in (5, 7):
        of_step = nemorl.at_version(loss_fn, version=5, present=present)
        assert needs_of(of_step) == needs_of(loss_fn)
        gradient, _ = run(of_step, batch)

        def plainly(output: ForwardOutput, batch: nemorl.TokenBatch) -> LossOutput:
            now, sampled = output.token_logprobs, batch.generation_logprobs
            since = {"version": 5, "progress": float(present - 5)}  # noqa: B023
            prox = interpolated_logprobs(now, sampled, batch.policy_versions, **since)
            v, _ = importance_weights(prox, sampled, batch.loss_mask, mode="mask", max=5.0)
            return clipped(now, prox, batch.advantages, batch.loss_weights, v)

        assert torch.equal(gradient, run(plainly, batch)[0])


GAP = (
    "token_mult_prob_error",
    "token_mult_prob_error_max",
    "gen_kl_error",
    "gen_kl_error_max",
)


def test_the_gap_of_an_interpolating_loss_is_of_the_present_policy_before_the_first_update():
    """Where the sampler's weights were the present ones, π_prox is the sampler itself."""
    batch = stale_batch()
    batch = replace(batch, policy_versions=torch.full_like(batch.input_ids, 5))
    loss_fn = make_loss(nemorl.GRPOConfig(off_policy=OffPolicyConfig(**INTERPOLATED), **TWICE))
    _, first = run(nemorl.at_version(loss_fn, version=5, present=5), batch)
    prev = torch.full_like(batch.loss_weights, -1.0)
    _, expected = run(make_loss(nemorl.GRPOConfig()), replace(batch, prev_logprobs=prev))
    assert {name: first[name] for name in GAP} == {name: expected[name] for name in GAP}
    assert first["token_mult_prob_error"] > 1.3
    _, later = run(nemorl.at_version(loss_fn, version=5, present=6), batch)
    assert not {*GAP} & later.keys()


def test_interpolation_needs_versions():
    config = nemorl.GRPOConfig(off_policy=OffPolicyConfig(**INTERPOLATED), **TWICE)
    batch, loss_fn = stale_batch(), make_loss(config)
    with pytest.raises(ValueError, match=r"pass nemorl\.at_version\(loss_fn, version=…"):
        run(loss_fn, batch)
    of_step = nemorl.at_version(loss_fn, version=5, present=5)
    message = r"^off_policy\.proximal must be recompute where completions have no policy_versions"
    with pytest.raises(ValueError, match=message):
        run(of_step, replace(batch, policy_versions=None))
    once = nemorl.GRPOConfig(off_policy=OffPolicyConfig(**INTERPOLATED))
    assert not once.interpolates, "one update: the policy precedes itself"
    run(make_loss(once), batch)


def test_an_interpolating_run_computes_no_logprobs_and_learns_the_same(tmp_path: Path, monkeypatch):
    """Samples of the newest weights: the proximal policy is the sampler, to rounding."""

    def history(folder: str, **section: Any) -> list[dict[str, float]]:
        off_policy = OffPolicyConfig(mode="truncate", **section)
        options = {"off_policy": off_policy, "run": {"samples_per_step": 0}, **TWICE}
        config = grpo_config(tmp_path / folder, steps=2, **options)
        return [numbers(line) for line in start(config).history]

    recomputed = history("recomputed")
    monkeypatch.setattr(responses, "by_segment", None)
    interpolated = history("interpolated", proximal="interpolate")
    for one, other in zip(recomputed, interpolated, strict=True):
        assert one["reward"] == other["reward"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_penalty_trains_where_rewards_are_equal(tmp_path: Path):
    penalty = OffPolicyConfig(penalty=0.1)
    config = ahead(tmp_path, 1, steps=3, off_policy=penalty, num_prompts_per_step=1)
    result = start(config, reward=lambda prompt, response: 0.5)
    assert [line["num_updates"] for line in result.history] == [1, 1, 1]

"""Off-policy corrections are their sources': each source's loss is written out here, a token at a
time, and compared in value and gradient on random and degenerate batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.losses.importance import importance_weights, interpolated_logprobs
from nemorl.losses.policy import clipped, log_ratio_penalty, on_policy, reinforce

NAN, INF = float("nan"), float("inf")
BATCHES = ("random", "near", "empty mask", "garbage off the mask", "one token", "extreme", "equal")
NOW = 5
"""Version of the weights that are trained."""


@dataclass(frozen=True)
class Batch:
    """Five responses in rows, float64."""

    now: Tensor
    prev: Tensor
    generation: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor

    @property
    def weights(self) -> Tensor:
        """Of a mean over tokens."""
        return self.mask.double() / self.mask.sum().clamp(min=1)

    def tokens(self) -> list[list[int]]:
        """Columns of the trained tokens of each row that has any."""
        return [row.nonzero().flatten().tolist() for row in self.mask]


def batch_of(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(BATCHES.index(kind))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape, noise = (5, 9), 0.05 if kind == "near" else 0.8
    mask = torch.rand(*shape, generator=generator) < 0.7
    mask[:, 0] = False
    prev = -normal(*shape).abs() - 0.05
    now, generation = prev + noise / 2 * normal(*shape), prev - noise * normal(*shape)
    advantages = normal(shape[0], 1).expand(shape).clone()
    advantages[-1] = 0
    versions = torch.randint(0, NOW + 1, shape, generator=generator).sort(-1).values
    if kind == "empty mask":
        mask[:] = False
    elif kind == "one token":
        mask[:] = False
        mask[2, 3] = True
    elif kind == "extreme":  # ratios of 0, and of e^20
        now = prev.clone()
        generation[mask] = prev[mask] - 20
        generation[2:][mask[2:]] = prev[2:][mask[2:]] + 800
    elif kind == "equal":
        now, generation = prev.clone(), prev.clone()
    if kind == "garbage off the mask":
        for array in (now, prev, generation, advantages):
            array[~mask] = torch.tensor([NAN, INF, -INF]).double().repeat(15)[: int((~mask).sum())]
    versions[~mask] = -1
    return Batch(now, prev, generation, advantages, mask, versions)


def agree(
    ours: Callable[[Tensor], Tensor],
    source: Callable[[Tensor], Tensor],
    now: Tensor,
    *,
    value: bool = True,
) -> None:
    """Equal in value and in gradient of the present logprobs."""
    found = []
    for loss_of in (ours, source):
        leaf = now.clone().requires_grad_()
        loss = loss_of(leaf)
        gradient = (
            torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(now)
        )
        found.append((loss.detach(), gradient))
    tolerance = {"rtol": 1e-9, "atol": 1e-8}
    torch.testing.assert_close(found[0][1], found[1][1], **tolerance)
    if value:
        torch.testing.assert_close(found[0][0], found[1][0], **tolerance)


def decoupled(
    batch: Batch,
    now: Tensor,
    weight_of: Callable[[list[int], Tensor], list[Any]],
    prox: Tensor,
    *,
    clip: float = 0.2,
) -> Tensor:
    """Mean over tokens of max(-A r, -A clip(r)) times a weight, r to the proximal policy."""
    total = now.new_zeros(())
    for row, columns in enumerate(batch.tokens()):
        gaps = torch.stack([prox[row, c] - batch.generation[row, c] for c in columns] or [total])
        gaps = gaps.detach()
        for c, weight in zip(columns, weight_of(columns, gaps), strict=False):
            a, r = batch.advantages[row, c], (now[row, c] - prox[row, c]).exp()
            loss = torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip))
            if weight != 0:
                total = total + weight * loss
    return total / max(1, int(batch.mask.sum()))


def bounded(ratio: float, low: float, high: float, *, drop: bool) -> float:
    if drop:
        return ratio if low <= ratio <= high else 0.0
    return min(max(ratio, low), high)


def exp(gap: float) -> float:
    return math.exp(max(-20.0, min(20.0, gap)))


def by_token(low: float, high: float, *, drop: bool):
    return lambda columns, gaps: [bounded(exp(g), low, high, drop=drop) for g in gaps.tolist()]


def by_sequence(low: float, high: float, *, drop: bool, mean: bool = False):
    def weights(columns: list[int], gaps: Tensor) -> list[float]:
        gap = float(gaps.sum()) / (max(1, len(columns)) if mean else 1)
        return [bounded(exp(gap), low, high, drop=drop)] * len(columns)

    return weights


def token_unless_the_mean_is_far(low: float, high: float):
    def weights(columns: list[int], gaps: Tensor) -> list[float]:
        kept = low <= exp(float(gaps.sum()) / max(1, len(columns))) <= high
        return [exp(g) * kept for g in gaps.tolist()]

    return weights


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "verl rollout_is=token, threshold 2; NeMo RL tis": (by_token(0, 2, drop=False), {}),
    "verl rollout_is=sequence; AReaL level sequence, action clamp, agg sum": (
        by_sequence(0, 2, drop=False),
        {"level": "sequence"},
    ),
    "verl rollout_is=token, threshold 0.5_5; IcePop": (
        by_token(0.5, 5, drop=True),
        {"mode": "mask", "min": 0.5, "max": 5.0},
    ),
    "NeMo RL seq-mask-tis": (
        token_unless_the_mean_is_far(0.9, 1.1),
        {"mode": "sequence_mask", "min": 0.9, "max": 1.1},
    ),
    "verl rollout_is=token with rollout_rs=seq_mean_k1": (
        lambda columns, gaps: [
            min(w, 2.0) for w in token_unless_the_mean_is_far(0.9, 1.1)(columns, gaps)
        ],
        {"geometric_bounds": (0.9, 1.1)},
    ),
    "TRL token_truncate; AReaL level token, action clamp": (
        by_token(0.5, 3, drop=False),
        {"min": 0.5, "max": 3.0},
    ),
    "TRL token_mask; AReaL level token, action mask": (
        by_token(0, 3, drop=True),
        {"mode": "mask", "max": 3.0},
    ),
    "TRL sequence_truncate": (
        by_sequence(0.2, 3, drop=False),
        {"level": "sequence", "min": 0.2, "max": 3.0},
    ),
    "TRL sequence_mask": (
        by_sequence(0, 3, drop=True),
        {"level": "sequence", "mode": "mask", "max": 3.0},
    ),
    "AReaL level sequence, action mask": (
        by_sequence(0.5, 2, drop=True, mean=True),
        {"level": "geometric", "mode": "mask", "min": 0.5, "max": 2.0},
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", SOURCES)
def test_weights_are_the_sources(name: str, kind: str):
    """With the ratio to the policy before the update: decoupled PPO, recomputed."""
    batch, (weight_of, options) = batch_of(kind), SOURCES[name]
    v, _ = importance_weights(batch.prev, batch.generation, batch.mask, **options)
    agree(
        lambda now: clipped(now, batch.prev, batch.advantages, batch.weights, v).loss,
        lambda now: decoupled(batch, now, weight_of, batch.prev),
        batch.now,
    )


@pytest.mark.parametrize("kind", BATCHES)
def test_interpolated_proximal_policy_is_areals(kind: str):
    """prox_logp_method loglinear: alpha = (current - 1 - behave) / (current - behave) in 0 … 1."""
    batch = batch_of(kind)

    def ours(now: Tensor) -> Tensor:
        prox = interpolated_logprobs(now, batch.generation, batch.versions, version=NOW - 1)
        v, _ = importance_weights(prox, batch.generation, batch.mask, mode="mask", max=5.0)
        return clipped(now, prox, batch.advantages, batch.weights, v).loss

    def source(now: Tensor) -> Tensor:
        prox = torch.zeros_like(batch.generation)
        for row, columns in enumerate(batch.tokens()):
            for c in columns:
                behave, old = int(batch.versions[row, c]), batch.generation[row, c]
                alpha = (NOW - 1 - behave) / (NOW - behave) if behave < NOW else 0.0
                alpha = min(max(alpha, 0.0), 1.0)
                prox[row, c] = old + alpha * (now[row, c].detach() - old)
        return decoupled(batch, now, by_token(0, 5, drop=True), prox)

    agree(ours, source, batch.now)


def test_interpolation_by_hand():
    now = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]])
    generation = torch.tensor([[-3.0, -3.0, -3.0, -3.0, NAN, -INF]])
    versions = torch.tensor([[2, 4, 6, -1, 2, -1]])

    def at(progress: float) -> list[float]:
        return interpolated_logprobs(now, generation, versions, version=4, progress=progress)[
            0
        ].tolist()

    assert at(2.0) == [-2.0, -3.0, -3.0, -3.0, -1.0, -1.0]  # alpha 2 / (2 + 2), else 0
    assert at(0.0) == [-1.0, -3.0, -3.0, -3.0, -1.0, -1.0]  # the present policy is version 4
    assert at(6.0)[0] == pytest.approx(-2.5)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("one_sided", [True, False])
def test_masks_and_penalty_are_prime_rls(kind: str, one_sided: bool):
    """Its default loss, and with `one_sided` off its loss "ipo": the present policy's ratio to the
    sampler's, without tokens whose probability moved far, and kl_tau · (log ratio)².
    """
    batch, tau = batch_of(kind), 1e-3
    low, high = (0.2, 0.1) if one_sided else (0.1, 0.1)

    def ours(now: Tensor) -> Tensor:
        prev = on_policy(now)
        v, _ = importance_weights(
            prev,
            batch.generation,
            batch.mask,
            None,
            batch.advantages if one_sided else None,
            max=INF,
            probability_bounds=(low, high),
        )
        output = reinforce(now, prev, batch.advantages, batch.weights, v)
        return (output + log_ratio_penalty(now, batch.generation, batch.weights, coef=tau)).loss

    def source(now: Tensor) -> Tensor:
        total = now.new_zeros(())
        for row, columns in enumerate(batch.tokens()):
            for c in columns:
                a, sampled = batch.advantages[row, c], batch.generation[row, c]
                log_ratio = now[row, c] - sampled
                moved = float(now[row, c].detach().exp() - sampled.exp())
                if one_sided:
                    dropped = moved > high if a > 0 else moved < -low
                else:
                    dropped = abs(moved) > high
                if not dropped:
                    total = total - a * log_ratio.exp()
                total = total + tau * log_ratio**2
        return total / max(1, int(batch.mask.sum()))

    agree(ours, source, batch.now)


def binary_kl(sampled: float, now: float) -> float:
    """As OpenRLHF bounds the probabilities; verl adds 1e-8 to 1 − p."""
    p, q = (min(max(exp(x), 1e-6), 1 - 1e-6) for x in (sampled, now))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


GATES = {
    "verl dppo_tv": {"max": 20.0, "probability_bounds": (0.1, 0.05)},
    "verl dppo_kl": {"max": 20.0, "binary_kl_bounds": (0.1, 0.05)},
    "OpenRLHF token, binary_kl": {"max": INF, "binary_kl_bounds": (0.05, 0.05)},
    "OpenRLHF seq, binary_kl (FlashREINFORCE)": {"max": INF, "mean_binary_kl": 0.25},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", GATES)
def test_gates_by_probability_are_verls_and_openrlhfs(name: str, kind: str):
    """In gradient: their values have log π."""
    batch, options, verl = batch_of(kind), GATES[name], name.startswith("verl")

    def ours(now: Tensor) -> Tensor:
        prev, a = on_policy(now), batch.advantages
        given = batch.generation, batch.mask, None, a if verl else None
        v, _ = importance_weights(prev, *given, **options)
        return reinforce(now, prev, a, batch.weights, v).loss

    def source(now: Tensor) -> Tensor:
        total = now.new_zeros(())
        for row, columns in enumerate(batch.tokens()):
            new, old = now[row].tolist(), batch.generation[row].tolist()
            gaps = {c: binary_kl(old[c], new[c]) for c in columns}
            mean = sum(gaps.values()) / max(1, len(gaps))
            for c in columns:
                a, gap = float(batch.advantages[row, c]), mean if "seq" in name else gaps[c]
                if name == "verl dppo_tv":
                    gap = abs(exp(new[c]) - exp(old[c]))
                kept = gap <= (0.1 if verl and a <= 0 else options.get("mean_binary_kl", 0.05))
                kept |= verl and (new[c] > old[c]) != (a > 0)
                ratio = min(exp(new[c] - old[c]), options["max"])
                total = total - kept * ratio * a * now[row, c]
        return total / max(1, int(batch.mask.sum()))

    agree(ours, source, batch.now, value=False)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masks_are_prime_rls_of_early_2026(kind: str, level: str):
    """Tokens outside (⅛, 8) are dropped, sequences with a token above 100, and those whose mean is
    outside (0.1, 10); the sequence's weight is at most 10. In gradient: its value has log π.
    """
    batch = batch_of(kind)

    def ours(now: Tensor) -> Tensor:
        prev = on_policy(now)
        v, _ = importance_weights(
            prev,
            batch.generation,
            batch.mask,
            level=level,
            max=10.0 if level == "sequence" else INF,
            token_bounds=(0.125, 8.0),
            extreme_bounds=(0.0, 100.0),
            geometric_bounds=(0.1, 10.0),
        )
        return reinforce(now, prev, batch.advantages, batch.weights, v).loss

    def source(now: Tensor) -> Tensor:
        total = now.new_zeros(())
        for row, columns in enumerate(batch.tokens()):
            gaps = [float(now[row, c].detach() - batch.generation[row, c]) for c in columns]
            ratios = [exp(gap) for gap in gaps]
            whole = min(exp(sum(gaps)), 10.0)
            mean = exp(sum(gaps) / max(1, len(gaps)))
            if max(ratios, default=1.0) > 100 or not 0.1 <= mean <= 10:
                continue
            for c, ratio in zip(columns, ratios, strict=True):
                if 0.125 <= ratio <= 8:
                    weight = whole if level == "sequence" else ratio
                    total = total - weight * batch.advantages[row, c] * now[row, c]
        return total / max(1, int(batch.mask.sum()))

    agree(ours, source, batch.now, value=False)


def test_the_penalty_by_hand():
    now = torch.tensor([[-1.0, -2.0, -1.0, NAN]], requires_grad=True)
    generation = torch.tensor([[-3.0, -2.5, NAN, 1.0]])
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    output = log_ratio_penalty(now, generation, weights, coef=0.1)
    assert output.loss.item() == pytest.approx(0.1 * (0.5 * 4 + 0.25 * 0.25))
    (gradient,) = torch.autograd.grad(output.loss, now)
    assert gradient[0].tolist() == pytest.approx([0.2, 0.025, 0, 0])
    assert output.metrics["log_ratio_squared"].finalize() == pytest.approx(4.25 / 2)

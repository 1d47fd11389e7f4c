"""Kullback-Leibler divergence: estimated per token, or exact."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from nemorl.losses.types import PerToken, TokenMask, masked, require_one_of

ESTIMATORS = ("k1", "k2", "k3")
GRADIENTS = ("pathwise", "score", "importance")
DIRECTIONS = ("forward", "reverse", "mixed", "jensen_shannon")


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)


def kl(
    token_logprobs: PerToken,
    reference_logprobs: PerToken,
    loss_mask: TokenMask,
    *,
    estimator: str = "k3",
    gradient: str = "pathwise",
    generation_logprobs: PerToken | None = None,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> PerToken:
    """Return an estimate of KL(π‖π_ref) at every token, in nats; 0 off the mask.

    With d = log π_ref − log π clamped to ±`input_clamp`: k1 = −d, k2 = d²/2, k3 = eᵈ − 1 − d (never
    negative), clamped to ±`output_clamp` (None = no clamp; a clamped estimate has no gradient).

    `gradient`: "pathwise" is the estimate's own (in expectation over π, k2 has the gradient of
    KL(π‖π_ref), k3 that of KL(π_ref‖π), k1 none); "score" that of the estimate ·
    exp(log π − sg log π), which adds the score-function term; "importance" that of the estimate ·
    π/π_gen, for tokens drawn from π_gen (log ratio clamped to ±`input_clamp`, and the product to
    ±`output_clamp`; 0 where log π_gen is not finite).

    Raises: ValueError for an unknown estimator or gradient, or unless `generation_logprobs` and
    gradient="importance" come together.
    Source: Schulman, "Approximating KL divergence" (2020); NeMo RL `reference_policy_kl_type`,
    `kl_input_clamp_value`, `kl_output_clamp_value`: "score", with `use_on_policy_kl_approximation`
    "importance", in older versions "pathwise".

    >>> mask = torch.tensor([[False, True]])
    >>> kl(torch.tensor([[0.0, -1.0]]), torch.tensor([[9.0, -1.5]]), mask)
    tensor([[0.0000, 0.1065]])
    """
    require_one_of("estimator", estimator, ESTIMATORS)
    require_one_of("gradient", gradient, GRADIENTS)
    if (gradient == "importance") != (generation_logprobs is not None):
        raise ValueError(
            "generation_logprobs must be given with gradient='importance' and no other, but"
            f" gradient is {gradient!r}: pass both or neither"
        )
    logprobs = masked(loss_mask, token_logprobs)
    d = _clamp(masked(loss_mask, reference_logprobs) - logprobs, input_clamp)
    if estimator == "k1":
        value = 0.0 - d
    elif estimator == "k2":
        value = d.square() / 2
    else:
        value = d.expm1() - d
    value = _clamp(value, output_clamp)
    if gradient == "score":
        value = value * (logprobs - logprobs.detach()).exp()
    elif generation_logprobs is not None:
        known = generation_logprobs.isfinite()
        log_ratio = logprobs - masked(loss_mask & known, generation_logprobs.detach())
        product = _clamp(value * _clamp(log_ratio, input_clamp).exp(), output_clamp)
        value = torch.where(known, product, 0.0)
    return value


def divergence(
    student_logprobs: Float[Tensor, "*rows vocab"],
    reference_logprobs: Float[Tensor, "*rows vocab"],
    *,
    direction: str = "reverse",
    mix: float = 0.5,
    floor: float | Float[Tensor, "*rows vocab"] = -math.inf,
) -> Float[Tensor, "*rows"]:
    """Return the divergence of two distributions, in nats, from logprobs over the last axis.

    With p_R the reference's and p_S the student's: forward = KL(R‖S) = Σ p_R (log p_R − log p_S);
    reverse = KL(S‖R), which `kl` estimates; mixed = mix · forward + (1 − mix) · reverse;
    jensen_shannon = mix · KL(R‖M) + (1 − mix) · KL(S‖M), M = mix · p_R + (1 − mix) · p_S.

    A token that the first argument of KL excludes (-inf) adds nothing to value or gradient; one
    that only the second excludes makes it infinite. `floor`: the least log p_R in reverse, of all
    or of each, which keeps that finite.

    Raises: ValueError for an unknown direction, and unless 0 ≤ mix ≤ 1 (jensen_shannon: 0 < mix <
    1). Source: GKD.

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> divergence(p, q, direction="reverse"), divergence(q, p, direction="forward")
    (tensor(0.1438), tensor(0.1438))
    """
    require_one_of("direction", direction, DIRECTIONS)
    if not 0 <= mix <= 1 or (direction == "jensen_shannon" and mix in (0, 1)):
        limits = "inside (0, 1)" if direction == "jensen_shannon" else "in [0, 1]"
        raise ValueError(f"mix must be {limits} for {direction!r}, but it is {mix}")
    if direction != "jensen_shannon":
        mix = {"forward": 1.0, "reverse": 0.0}.get(direction, mix)
        if mix == 1:
            return _kl(reference_logprobs, student_logprobs)
        reverse = _kl(student_logprobs, reference_logprobs.clamp(min=floor))
        if mix == 0:
            return reverse
        return mix * _kl(reference_logprobs, student_logprobs) + (1 - mix) * reverse
    # logaddexp of nothing has no gradient
    possible = (reference_logprobs > -math.inf) | (student_logprobs > -math.inf)
    student = torch.where(possible, student_logprobs, 0.0)
    reference = torch.where(possible, reference_logprobs, 0.0)
    middle = torch.logaddexp(reference + math.log(mix), student + math.log(1 - mix))
    return mix * _kl(reference_logprobs, middle) + (1 - mix) * _kl(student_logprobs, middle)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p (log p − log q), 0 where p is 0, so that no gradient meets inf − inf."""
    possible = log_p.exp() > 0
    safe_p, safe_q = torch.where(possible, log_p, 0.0), torch.where(possible, log_q, 0.0)
    return torch.where(possible, safe_p.exp() * (safe_p - safe_q), 0.0).sum(-1)

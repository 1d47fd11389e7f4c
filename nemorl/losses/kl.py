"""Kullback-Leibler divergence: per-token estimates from log-probabilities, and exact over the
vocabulary from logits.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.losses.masked import require_one_of
from nemorl.losses.segments import at_least_float32, same_segment

# Options are plain strings, so that a wrong one is a ValueError that lists the right ones, also
# where types are checked at run time.
ESTIMATORS = ("k1", "k2", "k3")
GRADIENTS = ("pathwise", "score", "importance")
DIRECTIONS = ("forward", "reverse", "mixed", "jensen_shannon")


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)


def kl(
    token_logprobs: Float[Tensor, "batch seq"],
    reference_logprobs: Float[Tensor, "batch seq"],
    loss_mask: Bool[Tensor, "batch seq"],
    *,
    estimator: str = "k3",
    gradient: str = "pathwise",
    generation_logprobs: Float[Tensor, "batch seq"] | None = None,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Float[Tensor, "batch seq"]:
    """An estimate of KL(π‖π_ref) at every token, in nats; 0 off the mask, where the inputs are not
    read.

    With d = log π_ref − log π clamped to ±`input_clamp`: k1 = −d, k2 = d²/2, k3 = eᵈ − 1 − d (never
    negative), then clamped to ±`output_clamp` (None = no clamp; a clamped token has no gradient of
    its own). `gradient` says what is differentiated:

    - "pathwise": the estimate alone. In expectation over π, k2 has then the gradient of
      KL(π‖π_ref), k3 that of KL(π_ref‖π), and k1 none at all.
    - "score": the estimate · exp(log π − sg log π); the same value, and the score-function term in
      the gradient.
    - "importance": the estimate · π/π_gen, for tokens drawn from `generation_logprobs`' policy (log
      ratio clamped to ±`input_clamp` as well).

    Raises ValueError for an unknown estimator or gradient, or if `generation_logprobs` and
    gradient="importance" don't come together. Source: Schulman, "Approximating KL divergence"
    (2020); NeMo RL `reference_policy_kl_type`, `kl_input_clamp_value`, `kl_output_clamp_value`:
    newer versions are "score", and "importance" with `use_on_policy_kl_approximation`; older ones
    "pathwise", with a weight that is not differentiated.

    >>> mask = torch.tensor([[False, True]])
    >>> kl(torch.tensor([[0.0, -1.0]]), torch.tensor([[9.0, -1.5]]), mask)
    tensor([[0.0000, 0.1065]])
    >>> kl(torch.tensor([[0.0, -1.0]]), torch.tensor([[9.0, -1.5]]), mask, estimator="k1").tolist()
    [[0.0, 0.5]]
    """
    require_one_of("estimator", estimator, ESTIMATORS)
    require_one_of("gradient", gradient, GRADIENTS)
    if (gradient == "importance") != (generation_logprobs is not None):
        raise ValueError(
            "kl: generation_logprobs are needed for gradient='importance' and not used by any"
            f" other (got gradient={gradient!r}, generation_logprobs"
            f" {'given' if generation_logprobs is not None else 'missing'}); pass both or neither"
        )
    logprobs = torch.where(loss_mask, at_least_float32(token_logprobs), 0.0)
    d = _clamp(
        torch.where(loss_mask, at_least_float32(reference_logprobs), 0.0) - logprobs, input_clamp
    )
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
        value = (
            value
            * _clamp(
                logprobs
                - torch.where(loss_mask, at_least_float32(generation_logprobs), 0.0).detach(),
                input_clamp,
            ).exp()
        )
    return value


def divergence(
    student_logprobs: Float[Tensor, "*rows vocab"],
    reference_logprobs: Float[Tensor, "*rows vocab"],
    *,
    direction: str = "reverse",
    mix: float = 0.5,
    floor: float = -math.inf,
) -> Float[Tensor, "*rows"]:
    """The divergence of two distributions given as log-probabilities over the last axis, in nats.

    forward = KL(reference‖student) = Σ p_R (log p_R − log p_S); reverse = KL(student‖reference);
    mixed = mix · forward + (1 − mix) · reverse, whose ends are those two to the last bit;
    jensen_shannon = mix · KL(reference‖M) + (1 − mix) · KL(student‖M) with M = mix · p_R + (1 −
    mix) · p_S.

    A token that the first argument of KL excludes (-inf) adds nothing, neither to the value nor to
    the gradient; one that the second alone excludes makes it infinite. `floor` is the least log p_R
    that the student is measured against in reverse, which keeps that finite.

    Raises ValueError for an unknown direction, and unless 0 ≤ mix ≤ 1 (jensen_shannon: 0 < mix <
    1). Source: GKD.

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> divergence(p, q, direction="reverse"), divergence(q, p, direction="forward")
    (tensor(0.1438), tensor(0.1438))
    """
    require_one_of("direction", direction, DIRECTIONS)
    if not 0 <= mix <= 1 or (direction == "jensen_shannon" and mix in (0, 1)):
        limits = "inside (0, 1)" if direction == "jensen_shannon" else "in [0, 1]"
        raise ValueError(f"mix must be {limits} for {direction!r}, but it is {mix}. 0.5 is usual.")
    if direction == "forward" or (direction == "mixed" and mix == 1):
        return _kl(reference_logprobs, student_logprobs)
    if direction == "reverse" or (direction == "mixed" and mix == 0):
        return _kl(student_logprobs, reference_logprobs.clamp(min=floor))
    if direction == "mixed":
        return mix * _kl(reference_logprobs, student_logprobs) + (1 - mix) * _kl(
            student_logprobs, reference_logprobs.clamp(min=floor)
        )
    possible = (reference_logprobs > -math.inf) | (
        student_logprobs > -math.inf
    )  # logaddexp of nothing and nothing has no gradient
    student, reference = (
        torch.where(possible, student_logprobs, 0.0),
        torch.where(possible, reference_logprobs, 0.0),
    )
    middle = torch.logaddexp(reference + math.log(mix), student + math.log(1 - mix))
    return mix * _kl(reference_logprobs, middle) + (1 - mix) * _kl(student_logprobs, middle)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p (log p − log q) with 0 · anything = 0.

    Both logs are cut off where p is 0, so that no gradient meets inf − inf.
    """
    possible = log_p.exp() > 0
    safe_p, safe_q = torch.where(possible, log_p, 0.0), torch.where(possible, log_q, 0.0)
    return torch.where(possible, safe_p.exp() * (safe_p - safe_q), 0.0).sum(-1)


def full_kl(
    student_logits: Float[Tensor, "batch seq vocab"],
    reference_logits: Float[Tensor, "batch seq vocab"],
    *,
    direction: str = "reverse",
    mix: float = 0.5,
    segment_ids: Int[Tensor, "batch seq"] | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "batch seq"]:
    """The exact `divergence` over the vocabulary, at index t of the two distributions that token t
    is drawn from; 0 at index 0.

    Logits come as the models give them and are shifted here. With `segment_ids` (0 = padding) the
    first token of every sequence and the padding are 0, and the logits that would predict them are
    not read. "reverse" is KL(π‖π_ref), what `kl` estimates. Float32 at least.

    >>> student, reference = torch.tensor([[[0.0, 0.0], [9.0, 0.0]]]), torch.tensor([[[0.0, 3.0], [0.0, 9.0]]]).log1p()
    >>> full_kl(student, reference)
    tensor([[0.0000, 0.2231]])
    """

    def logprobs(logits: Tensor) -> Tensor:
        logits = at_least_float32(logits[:, :-1])
        return (
            (logits if predicted is None else torch.where(predicted[..., None], logits, 0.0))
            .div(temperature)
            .log_softmax(-1)
        )

    predicted = None if segment_ids is None else same_segment(segment_ids)[:, 1:]
    return pad(
        divergence(
            logprobs(student_logits), logprobs(reference_logits), direction=direction, mix=mix
        ),
        (1, 0),
    )

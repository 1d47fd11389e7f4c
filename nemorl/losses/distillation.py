"""Distillation of a teacher's distributions p into a student's q, from whole logits or a top-k.

D per token, in nats, is `kl.divergence` with the teacher as reference, a constant. Distributions
are taken at `temperature` T and the loss is multiplied by T², which keeps the gradient's size.
Logits are unshifted: the loss at token t reads the logits at t − 1, and the first token of each
segment must have weight 0 (docs/numerics.md, Conventions).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.checks import require
from nemorl.losses.kl import divergence
from nemorl.losses.types import (
    LossOutput,
    PerToken,
    masked,
    mean_of,
    require_all,
    require_one_of,
    share_of,
    weighted_sum,
)

OUTSIDE = ("renormalize", "rest_mass", "zero")
LOG_NOTHING = -100.0
"""The teacher's off its top-k with `outside="zero"` (NeMo RL's number)."""
LOG_HIDDEN = -16.0
"""The teacher's rest in the reverse direction where its top-k sums to 1 within rounding: float32's
log-softmax shows no rest below 6e-8 = e^-16.6.
"""


def distillation(
    student_logits: Float[Tensor, "batch seq vocab"],
    teacher_logits: Float[Tensor, "batch seq vocab"],
    loss_weights: PerToken,
    *,
    direction: str = "forward",
    mix: float = 0.5,
    temperature: float = 1.0,
) -> LossOutput:
    """Return T² · Σ w · D(p, q) over the whole vocabulary.

    Metrics over the trained tokens: `divergence` (mean D in nats, without T²), `top1_agreement`
    (share whose most likely tokens are the same).
    Raises: ValueError as `kl.divergence`, and unless temperature > 0.
    Source: Hinton et al. 2015 (forward, T²); GKD (Agarwal et al. 2024), TRL GKDTrainer `beta` = mix
    of jensen_shannon; NeMo RL `kl_type`, `mixed_kl_weight` = mix.

    >>> student = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    >>> teacher = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).log()
    >>> loss = distillation(student, teacher, torch.tensor([[0.0, 1.0]])).loss
    >>> round(loss.item(), 4)  # 0.75 log 1.5 + 0.25 log 0.5
    0.1308
    """
    _require_temperature(temperature)
    weights = loss_weights[:, 1:]
    mask = (weights != 0).unsqueeze(-1)
    student = masked(mask.expand_as(student_logits[:, :-1]), student_logits[:, :-1])
    teacher = masked(mask.expand_as(teacher_logits[:, :-1]), teacher_logits[:, :-1].detach())
    log_p, log_q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return _output(
        divergence(log_q, log_p, direction=direction, mix=mix),
        student.argmax(-1) == teacher.argmax(-1),
        weights,
        temperature,
    )


def distillation_topk(
    student_logits: Float[Tensor, "batch seq vocab"],
    teacher_logprobs: Float[Tensor, "batch seq k"],
    teacher_ids: Int[Tensor, "batch seq k"],
    loss_weights: PerToken,
    *,
    direction: str = "forward",
    mix: float = 0.5,
    outside: str = "renormalize",
    temperature: float = 1.0,
) -> LossOutput:
    """Return the loss of `distillation` where only the teacher's k most likely tokens are known.

    Args:
        student_logits: unshifted.
        teacher_logprobs, teacher_ids: at index t about token t itself: log-probabilities at
            `temperature` over the whole vocabulary. -inf: an empty place, whatever its id. Ids must
            differ.
        loss_weights: w.
        outside: off the top-k. `renormalize`: both distributions are restricted to it and
            renormalized; `rest_mass`: all other tokens are one more outcome (whose probability for
            the teacher, where its top-k sums to 1 within rounding, is 0, and e^-16 in the reverse
            direction); `zero`: the teacher is renormalized and 0 outside (e^-100 in the reverse
            direction), the student is its whole distribution.
    Metrics: as `distillation`. Raises: as `distillation`, and for k = 0 and ids that repeat.
    Source: NeMo RL `zero_outside_topk=False` is `renormalize`, `True` is `zero`.

    >>> student = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 1.0, 1.0]]]).log()
    >>> logprobs = torch.tensor([[[0.0, 0.0], [0.6, 0.2]]]).log()
    >>> ids, weights = torch.tensor([[[0, 0], [0, 1]]]), torch.tensor([[0.0, 1.0]])
    >>> loss = distillation_topk(student, logprobs, ids, weights).loss
    >>> round(loss.item(), 4)  # 0.75 log 1.5 + 0.25 log 0.5
    0.1308
    """
    _require_temperature(temperature)
    require_one_of("outside", outside, OUTSIDE)
    weights = loss_weights[:, 1:]
    mask = (weights != 0).unsqueeze(-1)
    scaled = masked(mask.expand_as(student_logits[:, :-1]), student_logits[:, :-1]) / temperature
    teacher = masked(mask.expand_as(teacher_logprobs[:, 1:]), teacher_logprobs[:, 1:].detach())
    present = teacher > float("-inf")
    used = mask & present
    ids = torch.where(used, teacher_ids[:, 1:], 0).long()
    k = ids.shape[-1]
    require(k > 0, "teacher_ids", "must name at least one token each", k, "use nll without them")
    _require_distinct(ids, used)

    floor: float | Tensor = float("-inf")
    if outside == "renormalize":
        log_p, log_q = teacher.log_softmax(-1), _gather(scaled, ids, present).log_softmax(-1)
    else:
        log_q = scaled.log_softmax(-1)
        support = torch.zeros_like(scaled).scatter_add(-1, ids, present.to(scaled.dtype)) > 0
        if outside == "zero":
            floor = LOG_NOTHING
            known = torch.where(present, teacher.log_softmax(-1), 0.0)
            log_p = torch.where(support, 0.0, float("-inf")).to(scaled.dtype)
            log_p = log_p.scatter_add(-1, ids, known.to(scaled.dtype))
        else:
            rest = _log_rest(teacher, ~support)
            hidden = torch.where(rest == float("-inf"), LOG_HIDDEN, rest)
            log_p = torch.cat([teacher, rest], -1)
            log_q = torch.cat([_gather(log_q, ids, present), _log_sum(log_q, ~support)], -1)
            floor = torch.cat([teacher, hidden], -1)
    top1 = ids.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    return _output(
        divergence(log_q, log_p, direction=direction, mix=mix, floor=floor),
        scaled.argmax(-1) == top1,
        weights,
        temperature,
    )


def _output(divergences: Tensor, agree: Tensor, weights: Tensor, temperature: float) -> LossOutput:
    mask = weights != 0
    metrics = {"divergence": mean_of(divergences, mask), "top1_agreement": share_of(agree, mask)}
    return LossOutput(temperature**2 * weighted_sum(weights, divergences), metrics)


def _require_distinct(ids: Tensor, used: Tensor) -> None:
    empty = torch.arange(-ids.shape[-1], 0, device=ids.device)
    places = torch.where(used, ids, empty).sort(-1).values
    remedy = "give each once, and -inf as the logprob of an empty place"
    require_all(
        places.diff() != 0, f"teacher_ids must differ at a token, but some repeat: {remedy}"
    )


def _gather(values: Tensor, ids: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, values.gather(-1, ids), float("-inf"))


def _log_rest(logprobs: Tensor, outside: Tensor) -> Tensor:
    """log(1 − Σ exp), -inf within rounding; 1 − p₁, of the largest, is exact."""
    largest_first = logprobs.sort(-1, descending=True).values
    off_largest = -largest_first[..., :1].expm1()
    rest = off_largest - largest_first[..., 1:].exp().sum(-1, keepdim=True)
    rounding = torch.finfo(rest.dtype).eps * (logprobs.shape[-1] + 4) * off_largest.abs()
    some = (rest > rounding) & outside.any(-1, keepdim=True)
    return torch.where(some, torch.where(some, rest, 1.0).log(), float("-inf"))


def _log_sum(logprobs: Tensor, where: Tensor) -> Tensor:
    """log Σ exp over the last axis where `where`; -inf, with gradient 0, where there is nothing."""
    finite = where & (logprobs > float("-inf"))
    return torch.where(finite, logprobs, float("-inf")).logsumexp(-1, keepdim=True)


def _require_temperature(temperature: float) -> None:
    require(temperature > 0, "temperature", "must be above 0", temperature, "1 changes nothing")

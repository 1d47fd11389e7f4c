"""Distillation of a teacher's distributions into a student (SPEC §9): from whole logits, or from the teacher's top-k.

Divergences between the teacher's p and the student's q, per token, in nats: `forward` = KL(p‖q) = Σ p log(p/q); `reverse` = KL(q‖p);
`mixed` = mix · forward + (1 − mix) · reverse; `jensen_shannon` = mix · KL(p‖m) + (1 − mix) · KL(q‖m) with m = mix · p + (1 − mix) · q (0.5: the usual
one). Where a probability is 0 its term is 0, in value and gradient; -inf logits are fine. Where p > 0 = q the forward divergence is infinite, as it
should be. The teacher is a constant. Distributions are taken at `temperature` T, and the loss is multiplied with T², which keeps the gradient's size.
Logits come as the model gives them (position t predicts token t + 1); the loss at token t is that of the logits at t − 1, so `loss_weights[:, 0]` is
not used, and the first token of each packed segment must have weight 0, as SPEC §1 has it.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.losses.masked import masked, mean_of, require_one_of, share_of, weighted_sum
from nemorl.losses.types import LossOutput

DIRECTIONS = ("forward", "reverse", "mixed", "jensen_shannon")
OUTSIDE = ("renormalize", "rest_mass", "zero")
LOG_NOTHING = -100.0
"""What `outside="zero"` takes for the teacher's log-probability off its top-k, so that the reverse divergence stays finite (NeMo RL's number)."""


def distillation(
    student_logits: Float[Tensor, "batch seq vocab"],
    teacher_logits: Float[Tensor, "batch seq vocab"],
    loss_weights: Float[Tensor, "batch seq"],
    *,
    direction: str = "forward",
    mix: float = 0.5,
    temperature: float = 1.0,
) -> LossOutput:
    """T² · Σ w · D(p_teacher, q_student) over the whole vocabulary; the module's text says which D.

    Metrics over the trained tokens: `divergence` (mean D in nats, without T²), `top1_agreement` (share whose most likely tokens are the same).
    Raises: ValueError for an unknown direction, unless 0 ≤ mix ≤ 1 (jensen_shannon: 0 < mix < 1), unless temperature > 0.
    Source: Hinton et al. 2015 (forward, T²); GKD (Agarwal et al. 2024), TRL GKDTrainer `beta` = mix of jensen_shannon; NeMo RL `kl_type`,
    `mixed_kl_weight` = mix.

    >>> student = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    >>> teacher = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).log()
    >>> round(distillation(student, teacher, torch.tensor([[0.0, 1.0]])).loss.item(), 4)  # 0.75 log 1.5 + 0.25 log 0.5
    0.1308
    """
    _require_options(direction, mix, temperature)
    weights = loss_weights[:, 1:]
    mask = (weights != 0).unsqueeze(-1)
    student = masked(mask.expand_as(student_logits[:, :-1]), student_logits[:, :-1])
    teacher = masked(mask.expand_as(teacher_logits[:, :-1]), teacher_logits[:, :-1].detach())
    divergence = _divergence((teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1), direction, mix)
    return _output(divergence, student.argmax(-1) == teacher.argmax(-1), weights, temperature)


def distillation_topk(
    student_logits: Float[Tensor, "batch seq vocab"],
    teacher_logprobs: Float[Tensor, "batch seq k"],
    teacher_ids: Int[Tensor, "batch seq k"],
    loss_weights: Float[Tensor, "batch seq"],
    *,
    direction: str = "forward",
    mix: float = 0.5,
    outside: str = "renormalize",
    temperature: float = 1.0,
) -> LossOutput:
    """`distillation` when of the teacher only its k most likely tokens are known.

    `teacher_logprobs[:, t]` and `teacher_ids[:, t]` are about token t itself (the distribution it was drawn from), like every per-token array; only
    `student_logits` come unshifted. They are log-probabilities at `temperature` over the teacher's whole vocabulary; a place with -inf is empty,
    whatever its id. Ids must differ. `outside` says what happens off the top-k:
    `renormalize`: both distributions are restricted to the top-k and renormalised there (the student's mass outside is not seen);
    `rest_mass`: all other tokens are one more outcome with the teacher's and the student's rest of the mass. Never more than the whole divergence;
    `zero`: the teacher is renormalised and nothing outside (e^-100 for the reverse direction's sake), the student is its whole distribution.
    Metrics and errors: as `distillation`. Source: NeMo RL `zero_outside_topk=False` is `renormalize`, `True` is `zero`.

    >>> student = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 1.0, 1.0]]]).log()
    >>> logprobs, ids = torch.tensor([[[0.0, 0.0], [0.6, 0.2]]]).log(), torch.tensor([[[0, 0], [0, 1]]])
    >>> weights = torch.tensor([[0.0, 1.0]])
    >>> round(distillation_topk(student, logprobs, ids, weights).loss.item(), 4)  # 0.75 log 1.5 + 0.25 log 0.5
    0.1308
    >>> round(distillation_topk(student, logprobs, ids, weights, outside="rest_mass").loss.item(), 4)  # 0.6 log 2.4 + 0.2 log 0.8 + 0.2 log 0.4
    0.2974
    """
    _require_options(direction, mix, temperature)
    require_one_of("outside", outside, OUTSIDE)
    weights = loss_weights[:, 1:]
    mask = (weights != 0).unsqueeze(-1)
    scaled = masked(mask.expand_as(student_logits[:, :-1]), student_logits[:, :-1]) / temperature
    teacher = masked(mask.expand_as(teacher_logprobs[:, 1:]), teacher_logprobs[:, 1:].detach())
    present = teacher > float("-inf")
    ids = torch.where(mask & present, teacher_ids[:, 1:], 0).long()

    if outside == "renormalize":
        log_p, log_q = teacher.log_softmax(-1), _gather(scaled, ids, present).log_softmax(-1)
    else:
        log_q = scaled.log_softmax(-1)
        support = torch.zeros_like(scaled).scatter_add(-1, ids, present.to(scaled.dtype)) > 0
        if outside == "zero":
            known = torch.where(present, teacher.log_softmax(-1), 0.0)
            log_p = torch.where(support, 0.0, float("-inf")).to(scaled.dtype).scatter_add(-1, ids, known.to(scaled.dtype))
        else:
            log_p = torch.cat([teacher, _log_rest(teacher, ~support)], -1)
            log_q = torch.cat([_gather(log_q, ids, present), _log_sum(log_q, ~support)], -1)
    top1 = ids.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    divergence = _divergence(log_p, log_q, direction, mix, floor=LOG_NOTHING if outside == "zero" else float("-inf"))
    return _output(divergence, scaled.argmax(-1) == top1, weights, temperature)


def _output(divergence: Tensor, agree: Tensor, weights: Tensor, temperature: float) -> LossOutput:
    mask = weights != 0
    metrics = {"divergence": mean_of(divergence, mask), "top1_agreement": share_of(agree, mask)}
    return LossOutput(temperature**2 * weighted_sum(weights, divergence), metrics)


def _divergence(log_p: Tensor, log_q: Tensor, direction: str, mix: float, floor: float = float("-inf")) -> Tensor:
    """D over the last axis of two arrays of log-probabilities; the ends of `mixed` are `forward` and `reverse` to the last bit.

    `floor`: what the student's mass is measured against, at least, where the teacher has none.
    """
    if direction == "forward" or (direction == "mixed" and mix == 1):
        return _kl(log_p, log_q)
    if direction == "reverse" or (direction == "mixed" and mix == 0):
        return _kl(log_q, log_p.clamp(min=floor))
    if direction == "mixed":
        return mix * _kl(log_p, log_q) + (1 - mix) * _kl(log_q, log_p.clamp(min=floor))
    possible = (log_p > float("-inf")) | (log_q > float("-inf"))
    safe_p, safe_q = torch.where(possible, log_p, 0.0), torch.where(possible, log_q, 0.0)
    log_m = torch.logaddexp(safe_p + math.log(mix), safe_q + math.log(1 - mix))
    return mix * _kl(log_p, log_m) + (1 - mix) * _kl(log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p (log p − log q) with 0 · anything = 0. Both logs are cut off where p is 0, so that no gradient meets inf − inf."""
    possible = log_p.exp() > 0
    safe_p, safe_q = torch.where(possible, log_p, 0.0), torch.where(possible, log_q, 0.0)
    return torch.where(possible, safe_p.exp() * (safe_p - safe_q), 0.0).sum(-1)


def _gather(values: Tensor, ids: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, values.gather(-1, ids), float("-inf"))


def _log_rest(logprobs: Tensor, outside: Tensor) -> Tensor:
    """log(1 − Σ exp) over the last axis, kept; -inf where no token is outside, or where the rest is no more than the sum's own rounding."""
    total = logprobs.logsumexp(-1, keepdim=True)
    some = (total < -torch.finfo(total.dtype).eps * (logprobs.shape[-1] + 4)) & outside.any(-1, keepdim=True)
    return torch.where(some, (-torch.where(some, total, -1.0).expm1()).log(), float("-inf"))


def _log_sum(logprobs: Tensor, where: Tensor) -> Tensor:
    """log Σ exp over the last axis where `where`, kept; -inf, with gradient 0, where there is nothing."""
    finite = where & (logprobs > float("-inf"))  # an excluded token behind this where gets no gradient, whatever logsumexp makes of nothing
    return torch.where(finite, logprobs, float("-inf")).logsumexp(-1, keepdim=True)


def _require_options(direction: str, mix: float, temperature: float) -> None:
    require_one_of("direction", direction, DIRECTIONS)
    if not 0 <= mix <= 1 or (direction == "jensen_shannon" and mix in (0, 1)):
        limits = "inside (0, 1)" if direction == "jensen_shannon" else "in [0, 1]"
        raise ValueError(f"mix must be {limits} for {direction!r}, but it is {mix}. 0.5 is usual.")
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, but it is {temperature}. 1 leaves the distributions as they are.")

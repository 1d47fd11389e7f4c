"""Distillation of a teacher's distributions p into a student's q, from the teacher's top-k.

D per token, in nats, is `kl.divergence` with the teacher as reference, a constant. Index t of every
array is about token t (docs/numerics.md, Conventions).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

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
NOTHING = float("-inf")
LOG_ZERO = -100.0
"""The teacher's off its top-k with `outside="zero"` (NeMo RL's number)."""
LOG_HIDDEN = -16.0
"""The teacher's rest in the reverse direction where its top-k sums to 1 within rounding: float32's
log-softmax shows no rest below 6e-8 = e^-16.6.
"""


def distillation_topk(
    target_logprobs: Float[Tensor, "batch seq k"],
    target_rest_logprobs: PerToken,
    target_ids: Int[Tensor, "batch seq k"],
    teacher_logprobs: Float[Tensor, "batch seq k"],
    loss_weights: PerToken,
    *,
    entropy: PerToken | None = None,
    direction: str = "forward",
    mix: float = 0.5,
    outside: str = "renormalize",
    temperature: float = 1.0,
) -> LossOutput:
    """Return T² · Σ w · D(p, q) from both distributions at k tokens, or at the whole vocabulary.

    Args:
        target_logprobs, target_rest_logprobs: the student's, at `target_ids` and the log of its
            mass off them, -inf where there is no other token (`nemorl.needs(targets=True)`).
        target_ids, teacher_logprobs: the teacher's tokens. -inf: an empty place, whose token is
            outside unless another place has it. The ids of the others must differ.
        loss_weights: w.
        entropy: the student's, over the whole vocabulary: read, and required, by `zero` in the
            reverse and mixed directions.
        outside: off the top-k. `renormalize`: both distributions are restricted to it and
            renormalized; `rest_mass`: all other tokens are one more outcome (whose probability for
            the teacher, where its top-k sums to 1 within rounding, is 0, and e^-16 in the reverse
            direction); `zero`: the teacher is renormalized and 0 outside (e^-100 in the reverse
            direction), the student is its whole distribution.
        temperature: T, at which both distributions were taken. T² keeps the gradient's size.
    Metrics over the trained tokens: `divergence` (mean D in nats, without T²), `student_mass` and
    `teacher_mass` (mean Σ q and Σ p at the teacher's tokens), `topk_top1_agreement` (share whose
    likeliest of the teacher's tokens are the same).
    Raises: ValueError as `kl.divergence`; unless temperature > 0; for k = 0, ids that repeat,
    trained tokens without log-probabilities of a teacher, or a missing entropy.
    Source: Hinton et al. 2015 (forward, T²); GKD (Agarwal et al. 2024), TRL GKDTrainer `beta` = mix
    of jensen_shannon; NeMo RL `kl_type`, `mixed_kl_weight` = mix, `zero_outside_topk=False` is
    `renormalize`, `True` is `zero`.

    >>> student, rest = torch.tensor([[[1.0, 0.0], [0.25, 0.25]]]), torch.tensor([[0.0, 0.5]])
    >>> ids, teacher = torch.tensor([[[0, 1], [7, 4]]]), torch.tensor([[[0.0, 0.0], [0.6, 0.2]]])
    >>> arrays = student.log(), rest.log(), ids, teacher.log(), torch.tensor([[0.0, 1.0]])
    >>> round(distillation_topk(*arrays).loss.item(), 4)  # 0.75 log 1.5 + 0.25 log 0.5
    0.1308
    """
    require(temperature > 0, "temperature", "must be above 0", temperature, "1 changes nothing")
    require_one_of("outside", outside, OUTSIDE)
    mask = loss_weights != 0
    trained = mask.unsqueeze(-1).expand_as(target_ids)
    student = masked(trained, target_logprobs)
    teacher = masked(trained, teacher_logprobs.detach())
    _require_teacher(teacher, target_ids.shape[-1])
    present = teacher > NOTHING
    inside = torch.where(present, student, NOTHING)
    empty = _empty_places(target_ids.long(), present, trained)
    off_ids = masked(mask, target_rest_logprobs).unsqueeze(-1)
    rest = _log_sum(torch.cat([torch.where(empty, student, NOTHING), off_ids], -1))
    log_p, log_q, floor = _outcomes(teacher, inside, rest, outside)
    found = divergence(log_q, log_p, direction=direction, mix=mix, floor=floor)
    reverse = {"reverse": 1.0, "mixed": 1 - mix}.get(direction, 0.0)
    if outside == "zero" and reverse:
        if entropy is None:
            raise ValueError(
                f"entropy must be given for outside='zero' in the direction {direction!r}, but it"
                " is None: declare @nemorl.needs(targets=True, entropy=True)"
            )
        # the tokens outside were one outcome
        one_outcome = divergence(torch.zeros_like(log_q), log_q, direction="forward")
        found = found - reverse * (masked(mask, entropy) + one_outcome)
    metrics = {
        "divergence": mean_of(found, mask),
        "student_mass": mean_of(inside.exp().sum(-1), mask),
        "teacher_mass": mean_of(teacher.exp().sum(-1), mask),
        "topk_top1_agreement": share_of(inside.argmax(-1) == teacher.argmax(-1), mask),
    }
    return LossOutput(temperature**2 * weighted_sum(loss_weights, found), metrics)


def _require_teacher(logprobs: Tensor, k: int) -> None:
    require(k > 0, "target_ids", "must name at least one token each", k, "use nll without them")
    require_all(
        (logprobs > NOTHING).any(-1) & (logprobs < 0.01).all(-1),
        "teacher_logprobs must be log-probabilities, at least one above -inf, at every trained"
        " token, but some are not: give those tokens no loss weight",
    )


def _outcomes(
    teacher: Tensor, student: Tensor, rest: Tensor, outside: str
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Both sides' log-probabilities of what is compared, and the teacher's least in reverse."""
    if outside == "renormalize":
        return teacher.log_softmax(-1), student.log_softmax(-1), NOTHING
    log_q = torch.cat([student, rest], -1)
    if outside == "zero":
        return pad(teacher.log_softmax(-1), (0, 1), value=NOTHING), log_q, LOG_ZERO
    teacher_rest = _log_rest(teacher, rest)
    hidden = torch.where(teacher_rest == NOTHING, LOG_HIDDEN, teacher_rest)
    return torch.cat([teacher, teacher_rest], -1), log_q, torch.cat([teacher, hidden], -1)


def _empty_places(ids: Tensor, present: Tensor, trained: Tensor) -> Tensor:
    """True at one empty place of each id that no present place has; present ids must differ."""
    keys, order = (2 * ids + ~present).sort(-1)
    first = (keys >> 1).diff(prepend=torch.full_like(keys[..., :1], -1)) != 0
    require_all(
        first | (keys % 2 == 1) | ~trained,
        "target_ids must differ at a token, but some repeat: give each once, and -inf as the"
        " logprob of an empty place",
    )
    return torch.zeros_like(first).scatter(-1, order, first & (keys % 2 == 1))


def _log_rest(logprobs: Tensor, outside: Tensor) -> Tensor:
    """log(1 − Σ exp), -inf within rounding or if `outside` is; 1 − p₁, of the largest, is exact."""
    largest_first = logprobs.sort(-1, descending=True).values
    off_largest = -largest_first[..., :1].expm1()
    rest = off_largest - largest_first[..., 1:].exp().sum(-1, keepdim=True)
    rounding = torch.finfo(rest.dtype).eps * (logprobs.shape[-1] + 4) * off_largest.abs()
    some = (rest > rounding) & (outside > NOTHING)
    return torch.where(some, torch.where(some, rest, 1.0).log(), NOTHING)


def _log_sum(logprobs: Tensor) -> Tensor:
    """log Σ exp over the last axis; -inf, with gradient 0, where there is nothing."""
    return torch.where(logprobs == NOTHING, NOTHING, logprobs).logsumexp(-1, keepdim=True)

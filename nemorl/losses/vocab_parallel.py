"""Log-probabilities where each rank of a group has a part of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.losses.logprobs import (
    LogprobKind,
    _capped,
    _filtered,
    _finite,
    _slope,
    flat_linear_logprobs,
)
from nemorl.losses.segments import at_least_float32


class _VocabParallelLinearLogprobs(torch.autograd.Function):
    """`_LinearLogprobs` with a rank's rows of the head; `hidden`'s gradient is its summand."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, group, kind, chunk, with_entropy, softcap):
        logprobs, normalizers, entropies = [], [], []
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(hidden.dtype)
            for h, y in zip(hidden.split(chunk), ids.split(chunk), strict=True):
                logits = _capped(at_least_float32(h @ head.t()), softcap)
                logits, mine, place = _local_logits(logits, y, group, kind)
                top = logits.amax(-1)
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
                shifted = logits - top[:, None]
                target = torch.where(mine, shifted.gather(-1, place[:, None])[:, 0], 0.0)
                weights = shifted.exp()
                moments = (
                    (weights * _finite(shifted)).sum(-1)
                    if with_entropy
                    else torch.zeros_like(target)
                )
                parts = torch.stack([target, weights.sum(-1), moments])
                dist.all_reduce(parts, group=group)
                target, total, moments = parts
                logprobs.append(target - total.log())
                normalizers.append(top + total.log())
                entropies.append(total.log() - moments / total if with_entropy else moments)
                del logits, shifted, weights
        result = torch.cat(logprobs), torch.cat(entropies)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, ids, torch.cat(normalizers), result[1])
        ctx.options = group, kind, chunk, softcap
        return result

    @staticmethod
    def backward(ctx, *grads: Any):
        hidden, weight, ids, normalizers, entropies = ctx.saved_tensors
        group, kind, chunk, softcap = ctx.options
        # With respect to the logits z: d log p(y) = 1[y] − p, dH = −p (log p + H).
        g, ge = (None if grad is None else (grad / kind.temperature)[:, None] for grad in grads)
        offset = (
            torch.zeros_like(entropies)[:, None]
            - (0.0 if g is None else g)
            - (0.0 if ge is None else ge * entropies[:, None])
        )
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(
            weight, dtype=torch.promote_types(weight.dtype, torch.float32)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(hidden.dtype)
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                capped = _capped(at_least_float32(hidden[rows] @ head.t()), softcap)
                logits, mine, place = _local_logits(capped, ids[rows], group, kind)
                every = logits - normalizers[rows, None]
                grad = every.exp() * (
                    offset[rows]
                    if ge is None
                    else torch.addcmul(offset[rows], -ge[rows], _finite(every))
                )
                del every, logits
                if g is not None:
                    grad = grad.scatter_add_(
                        1, place[:, None], torch.where(mine[:, None], g[rows], 0.0)
                    )
                if softcap is not None:
                    grad = grad * _slope(capped, softcap)
                del capped
                grad = grad.to(hidden.dtype)
                grad_hidden[rows] = grad @ head
                if ctx.needs_input_grad[1]:
                    if grad.dtype == grad_weight.dtype:
                        grad_weight.addmm_(grad.t(), hidden[rows])
                    else:
                        grad_weight.add_(grad.t() @ hidden[rows])
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            *[None] * 6,
        )


def _local_logits(
    local: Tensor, ids: Tensor, group: dist.ProcessGroup, kind: LogprobKind
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's filtered logits of this rank's tokens; which tokens are in it, and where."""
    size = local.shape[1]
    first = dist.get_rank(group) * size
    if kind.filtered:  # needs the whole vocabulary
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        local = _filtered(torch.cat(parts, -1), kind, ids)[:, first : first + size]
    else:
        local = _filtered(local, kind, None)
    place = ids - first
    return local, (place >= 0) & (place < size), place.clamp(0, size - 1)


def vocab_parallel_linear_logprobs(
    states: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "shard hidden"],
    ids: Int[Tensor, "tokens"],
    group: dist.ProcessGroup | None,
    *,
    kind: LogprobKind = LogprobKind(),
    chunk: int = 1024,
    with_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return `flat_linear_logprobs` where each rank of `group` has equally many rows of the head.

    Parts are in the order of ranks; group=None: this process has all. All ranks have the same
    states and get the same result and, if all go on to the same loss, the gradient of their rows of
    `weight`, but only their summand of the gradient of `states`, which the caller sums.

    >>> states, weight = torch.ones(1, 1), torch.zeros(2, 1)
    >>> vocab_parallel_linear_logprobs(states, weight, torch.tensor([1]), None)[0].tolist()
    [-0.6931471824645996]
    """
    if group is None:
        options: dict[str, Any] = {"with_entropy": with_entropy, "softcap": softcap}
        return flat_linear_logprobs(states, weight, ids, kind=kind, chunk=chunk, **options)
    return _VocabParallelLinearLogprobs.apply(
        states, weight, ids.long(), group, kind, chunk, with_entropy, softcap
    )

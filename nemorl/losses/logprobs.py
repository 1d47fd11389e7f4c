"""Log-probabilities and entropies of tokens, from logits or from hidden states, and their kinds.

The shift by one happens here alone (docs/numerics.md, Conventions).
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.checks import at_least, require
from nemorl.losses.types import PerToken, TokenIds, at_least_float32, register_pytree, same_segment

PerRow = float | Float[Tensor, "*rows"]


class LogprobKindError(ValueError):
    """Two arrays of log-probabilities are of distributions that can't be compared."""


@dataclass(frozen=True)
class LogprobKind:
    """A distribution: the model's logits / `temperature`, restricted to the filters' support.

    `top_k=0`, `top_p=1` and `min_p=0` are off. It names no version of the weights: a ratio compares
    two versions under one kind. Raises: ValueError for a value out of its range (greedy decoding
    has no distribution).

    >>> LogprobKind(temperature=0.7, top_p=0.9).filtered
    True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for name, ok, requirement, remedy in (
            (
                "temperature",
                0 < self.temperature < math.inf,
                "finite and above 0",
                "score greedy tokens at temperature 1",
            ),
            ("top_k", self.top_k >= 0, "at least 0", "0 turns it off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1", "1 turns it off"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1", "0 turns it off"),
        ):
            value = getattr(self, name)
            require(ok, f"LogprobKind.{name}", f"must be {requirement}", value, remedy)

    @property
    def filtered(self) -> bool:
        """Whether some tokens are outside the support."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def require_same_support(
    kind_a: LogprobKind,
    kind_b: LogprobKind,
    *,
    what_a: str = "left",
    what_b: str = "right",
) -> None:
    """Raise LogprobKindError unless two kinds have the same temperature and filters.

    >>> kind = LogprobKind(top_k=5)
    >>> require_same_support(LogprobKind(), kind, what_a="prev", what_b="generation")
    Traceback (most recent call last):
    nemorl.losses.logprobs.LogprobKindError: prev and generation log-probabilities are of ...
    """
    pairs = {f.name: (getattr(kind_a, f.name), getattr(kind_b, f.name)) for f in fields(kind_a)}
    unlike = [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]
    if unlike:
        raise LogprobKindError(
            f"{what_a} and {what_b} log-probabilities are of different distributions"
            f" ({'; '.join(unlike)}): compute both with the same temperature and filters"
        )


@dataclass(frozen=True)
class Logprobs:
    """An array of log-probabilities and its kind; a pytree.

    `a - b` is the difference of the values, LogprobKindError where the kinds differ.

    >>> one, two = (Logprobs(torch.tensor([x]), LogprobKind()) for x in (-1.0, -3.0))
    >>> (one - two).tolist()
    [2.0]
    """

    values: Float[Tensor, "*shape"]
    kind: LogprobKind

    def __sub__(self, other: "Logprobs") -> Float[Tensor, "*shape"]:
        require_same_support(self.kind, other.kind)
        return self.values - other.values


register_pytree(Logprobs, constant="kind")


def _is_on(value: float | Tensor, off: float) -> bool:
    return isinstance(value, Tensor) or value != off


def _column_like(value: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value[..., None].to(like.device, like.dtype)
    return like.new_full((), value)


def running_mass(
    probabilities: Float[Tensor, "*rows vocab"],
) -> Int[Tensor, "*rows vocab"]:
    """Return sums of the probabilities up to each, in units of 2^-50: integers, because CUDA has no
    deterministic kernel for running sums of others.

    >>> (running_mass(torch.tensor([0.5, 0.25, 0.25])) / 2**50).tolist()
    [0.5, 0.75, 1.0]
    """
    return _whole(probabilities).cumsum(-1)


def _whole(probabilities: Tensor) -> Tensor:
    return (probabilities * 2.0**50).long()


def _outside_support(
    scaled: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    min_p: float | Tensor,
    keep: Tensor | None,
) -> Tensor:
    top = scaled.amax(-1, keepdim=True)
    threshold = torch.full_like(top, -math.inf)
    if _is_on(min_p, 0.0):
        threshold = top + _column_like(min_p, scaled).log()
    if isinstance(top_k, Tensor) or _is_on(top_p, 1.0):
        order, index = scaled.sort(dim=-1, stable=True)
        if _is_on(top_k, 0):
            k = _column_like(top_k, index).expand(top.shape)
            kth = order.gather(-1, (order.shape[-1] - k).clamp(0, order.shape[-1] - 1))
            threshold = torch.where(k > 0, torch.maximum(threshold, kth), threshold)
        outside = order < threshold
        if _is_on(top_p, 1.0):
            # From the least likely token, as in vLLM. The most likely one stays.
            mass = running_mass(torch.where(outside, -math.inf, order).softmax(-1))
            p = _column_like(top_p, scaled)
            outside = outside | pad(((mass <= _whole(1 - p)) & (p < 1))[..., :-1], (0, 1))
        outside = torch.zeros_like(outside).scatter(-1, index, outside)
    else:
        if _is_on(top_k, 0) and top_k < scaled.shape[-1]:
            threshold = torch.maximum(threshold, scaled.topk(top_k, dim=-1).values[..., -1:])
        outside = scaled < threshold
    return outside if keep is None else outside.scatter(-1, keep[..., None].long(), False)


def filter_logits(
    logits: Float[Tensor, "*rows vocab"],
    *,
    temperature: PerRow = 1.0,
    top_k: int | Int[Tensor, "*rows"] = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    keep: Int[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """Return the logits that are sampled from: divided by `temperature`, -inf outside the support.

    In vLLM's order: temperature; `min_p` keeps tokens with at least min_p times the largest
    probability; `top_k` keeps the k largest (0 = off) and any that equal the last of them;
    `top_p` keeps the fewest largest tokens whose mass, within what is left, reaches top_p, of equal
    ones the last. (Hugging Face applies min_p last; of equal ones vLLM keeps as many, but leaves to
    its sort which.) Options that are off cost nothing. `keep`: a token per row that is never
    excluded, as the drawn one, which another engine's rounding may exclude.

    >>> filter_logits(torch.tensor([2.0, 1.0, 0.0]), temperature=0.5, top_k=2).tolist()
    [4.0, 2.0, -inf]
    >>> filter_logits(torch.tensor([[2.0, 1.0, 0.0]]), top_k=1, keep=torch.tensor([2])).tolist()
    [[2.0, -inf, 0.0]]
    """
    if isinstance(temperature, Tensor):
        temperature = temperature[..., None]
    scaled = logits / temperature if _is_on(temperature, 1.0) else logits
    if not (_is_on(top_k, 0) or _is_on(top_p, 1.0) or _is_on(min_p, 0.0)):
        return scaled
    outside = _outside_support(scaled.detach(), top_k, top_p, min_p, keep)
    return torch.where(outside, -math.inf, scaled)


def _filtered(logits: Tensor, kind: LogprobKind, keep: Tensor | None) -> Tensor:
    return filter_logits(logits, keep=keep, **vars(kind))


def _predictions(logits: Tensor, segment_ids: Tensor | None) -> Tensor:
    """The logits that predict tokens 1.. of each row, in float32 at least, or 0."""
    _require_tokens(logits)
    logits = at_least_float32(logits[:, :-1])
    if segment_ids is None:
        return logits
    return torch.where(same_segment(segment_ids)[:, 1:, None], logits, 0.0)


def _require_tokens(values: Tensor) -> None:
    length = values.shape[1]
    require(length > 0, "seq", "must be at least 1", length, "leave out rows without a token")


def _describe(values: Tensor, segment_ids: Tensor | None) -> Tensor:
    """[batch seq-1] by predicted token → [batch seq] by the token itself, else 0."""
    if segment_ids is not None:
        values = torch.where(same_segment(segment_ids)[:, 1:], values, 0.0)
    return pad(values, (1, 0))


def _finite(logprobs: Tensor) -> Tensor:
    """Log-probabilities to multiply by their probability: exp(-1e4) is 0 in every type."""
    return logprobs.clamp(min=-1e4)


def token_logprobs(
    logits: Float[Tensor, "batch seq vocab"],
    input_ids: TokenIds,
    *,
    segment_ids: TokenIds | None = None,
    kind: LogprobKind = LogprobKind(),
) -> PerToken:
    """Return log π(x_t | x_<t) at index t: `log_softmax(filter_logits(logits[:, t - 1]))[x_t]`.

    Index 0 of every row is 0. With `segment_ids` (0 = padding) so are each sequence's first token
    and the padding, whose logits are not read. Computed in float32 at least.

    Args:
        logits: as a causal model gives them.
        input_ids: valid ids, on padding too (-100 is none).
        kind: the distribution that the tokens were drawn from; its support includes the token.
    Raises: ValueError for rows without a token (seq = 0).

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 9.0]]])
    >>> token_logprobs(logits, torch.tensor([[1, 1]])).tolist()
    [[0.0, -0.6931471824645996]]
    """
    targets = input_ids[:, 1:, None].long()
    logprobs = _filtered(_predictions(logits, segment_ids), kind, targets[..., 0]).log_softmax(-1)
    return _describe(logprobs.gather(-1, targets)[..., 0], segment_ids)


def entropy(
    logits: Float[Tensor, "batch seq vocab"],
    *,
    segment_ids: TokenIds | None = None,
    kind: LogprobKind = LogprobKind(),
) -> PerToken:
    """Return −Σ_v p_v log p_v in nats at each token; 0 where `token_logprobs` is by convention.

    >>> entropy(torch.zeros(1, 2, 4), kind=LogprobKind(top_k=4)).tolist()
    [[0.0, 1.3862943649291992]]
    """
    logprobs = _filtered(_predictions(logits, segment_ids), kind, None).log_softmax(-1)
    return _describe(-(logprobs.exp() * _finite(logprobs)).sum(-1), segment_ids)


def _cotangents(grads: Any, kind: LogprobKind, entropies: Tensor) -> Any:
    # With respect to the logits z: d log p(y) = 1[y] − p, dH = −p (log p + H).
    g, ge = (None if grad is None else (grad / kind.temperature)[:, None] for grad in grads)
    offset = torch.zeros_like(entropies)[:, None] - (0.0 if g is None else g)
    return g, ge, offset - (0.0 if ge is None else ge * entropies[:, None])


class _LinearLogprobs(torch.autograd.Function):
    """In place changes only what no second derivative and no `vmap` has to remember."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden, weight, ids, kind, chunk, dtype, with_entropy, softcap):
        logprobs, entropies = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            for h, y in zip(hidden.split(chunk), ids.split(chunk), strict=True):
                logits = _capped(at_least_float32(h.to(dtype) @ head.t()), softcap)
                every = _filtered(logits, kind, y).log_softmax(-1)
                del logits
                logprobs.append(every.gather(-1, y[:, None])[:, 0])
                if with_entropy:
                    entropies.append(
                        -every.exp().mul_(_finite(every) if kind.filtered else every).sum(-1)
                    )
                del every  # one [chunk, vocab] array less at the peak
        result = torch.cat(logprobs)
        return result, torch.cat(entropies) if with_entropy else torch.zeros_like(result)

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, ids, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, ids, output[1])

    @staticmethod
    def backward(ctx, *grads: Any):
        hidden, weight, ids, entropies = ctx.saved_tensors
        kind, chunk, dtype, _, softcap = ctx.options
        g, ge, offset = _cotangents(grads, kind, entropies)
        grad_hidden, grad_weight = [], None
        final = not torch.is_grad_enabled()  # no second derivative: sums may grow in place
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            # Without tokens: one empty chunk, and gradients of zeros.
            for start in range(0, max(len(hidden), 1), chunk):
                rows = slice(start, start + chunk)
                h, y = hidden[rows].to(dtype), ids[rows]
                capped = _capped(at_least_float32(h @ head.t()), softcap)
                logits = _filtered(capped, kind, y)
                if ge is None:
                    grad = logits.softmax(-1) * offset[rows]
                else:
                    every = logits.log_softmax(-1)
                    grad = every.exp() * torch.addcmul(
                        offset[rows], -ge[rows], _finite(every) if kind.filtered else every
                    )
                    del every
                if g is not None:
                    grad = grad.scatter_add_(1, y[:, None], g[rows])
                if softcap is not None:
                    grad = grad * _slope(capped, softcap)
                del capped, logits
                grad = grad.to(dtype)
                if ctx.needs_input_grad[0]:
                    grad_hidden.append(grad @ head)
                # Partial products in the model's type, their sum over chunks in float32.
                if ctx.needs_input_grad[1]:
                    if grad_weight is None:
                        grad_weight = at_least_float32(grad.t() @ h)
                    elif final and grad_weight.dtype == dtype:
                        grad_weight.addmm_(grad.t(), h)
                    else:
                        grad_weight.add_(at_least_float32(grad.t() @ h))
                del grad
        return (
            torch.cat(grad_hidden).to(hidden.dtype) if grad_hidden else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            *[None] * 6,
        )


@dataclass(frozen=True)
class Logits:
    """How a language model's logits follow from its hidden states h: with z = scale · h · weightᵀ,
    z itself or softcap · tanh(z / softcap).
    """

    scale: float = 1.0
    softcap: float | None = None

    def scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.scale == 1 else self.scale * hidden

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return _capped(self.scaled(hidden) @ weight.to(hidden.dtype).t(), self.softcap)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _slope(capped: Tensor, softcap: float) -> Tensor:
    return 1 - (capped / softcap) ** 2


def flat_linear_logprobs(
    states: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    ids: Int[Tensor, "tokens"],
    *,
    kind: LogprobKind = LogprobKind(),
    chunk: int = 1024,
    with_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return log p(ids) under softmax(states @ weight.T), unshifted, and its entropy.

    The entropy is 0 unless asked for. Arguments: as `linear_token_logprobs`.

    >>> states, weight = torch.ones(1, 1), torch.zeros(2, 1)
    >>> flat_linear_logprobs(states, weight, torch.tensor([1]))[0].tolist()
    [-0.6931471824645996]
    """
    at_least(1, chunk=chunk)
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    options = (kind, chunk, dtype, with_entropy, softcap)
    return _LinearLogprobs.apply(states, weight, ids.long(), *options)


def linear_token_logprobs(
    hidden: Float[Tensor, "batch seq hidden"],
    weight: Float[Tensor, "vocab hidden"],
    input_ids: TokenIds,
    *,
    segment_ids: TokenIds | None = None,
    kind: LogprobKind = LogprobKind(),
    chunk: int = 1024,
    with_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[PerToken, PerToken | None]:
    """Return `token_logprobs` (and the entropy) of the logits `hidden @ weight.T`, chunk by chunk.

    Logits are computed `chunk` tokens at a time, forward and again backward: memory beyond
    arguments and gradients is O(chunk · vocab). Products run in the type of `hidden` (under
    autocast in autocast's), softmax and the sum of `weight`'s gradient in float32 at least.
    Differentiable in `hidden` and `weight`, also under `torch.func` (grad, vmap).

    `weight`: of the LM head. `input_ids`, `segment_ids`, `kind`: as `token_logprobs`. Without
    `with_entropy` the entropy is None. `softcap`: logits z become softcap · tanh(z / softcap),
    before the temperature (Gemma 2).
    Raises: ValueError if `chunk` is less than 1.

    >>> hidden, weight = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0.0], [0.0]])
    >>> linear_token_logprobs(hidden, weight, torch.tensor([[1, 1]]), with_entropy=True)
    (tensor([[ 0.0000, -0.6931]]), tensor([[0.0000, 0.6931]]))
    """
    _require_tokens(hidden)
    states = hidden[:, :-1]
    if segment_ids is not None:
        states = torch.where(same_segment(segment_ids)[:, 1:, None], states, 0.0)
    targets = input_ids[:, 1:]
    logprobs, entropies = flat_linear_logprobs(
        states.flatten(0, 1),
        weight,
        targets.flatten(),
        kind=kind,
        chunk=chunk,
        with_entropy=with_entropy,
        softcap=softcap,
    )
    return _describe(logprobs.view(targets.shape), segment_ids), (
        _describe(entropies.view(targets.shape), segment_ids) if with_entropy else None
    )


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
        g, ge, offset = _cotangents(grads, kind, entropies)
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
        return flat_linear_logprobs(
            states, weight, ids, kind=kind, chunk=chunk, with_entropy=with_entropy, softcap=softcap
        )
    return _VocabParallelLinearLogprobs.apply(
        states, weight, ids.long(), group, kind, chunk, with_entropy, softcap
    )

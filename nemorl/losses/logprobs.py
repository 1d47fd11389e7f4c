"""Log-probabilities and entropies of tokens, from logits or from hidden states, and their kinds.

The shift by one happens here alone (docs/numerics.md, Conventions).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

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
    kind_a: LogprobKind, kind_b: LogprobKind, *, what_a: str = "left", what_b: str = "right"
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
    """An array of log-probabilities and its kind; a pytree."""

    values: Float[Tensor, "*shape"]
    kind: LogprobKind


register_pytree(Logprobs, constant="kind")


def _is_on(value: float | Tensor, off: float) -> bool:
    return isinstance(value, Tensor) or value != off


def _column_like(value: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value[..., None].to(like.device, like.dtype)
    return like.new_full((), value)


def running_mass(probabilities: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows vocab"]:
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


class HeadOutputs(NamedTuple):
    """What a head computes of each token's distribution p. Without `top_k` or `targets` theirs are
    None.
    """

    token_logprobs: Float[Tensor, "tokens"]
    entropy: Float[Tensor, "tokens"]
    """0 unless asked for."""
    target_logprobs: Float[Tensor, "tokens k"] | None = None
    """log p of given ids; -inf, with gradient 0, outside a filter's support."""
    target_rest_logprobs: Float[Tensor, "tokens"] | None = None
    """log Σ p over all other tokens; -inf, with gradient 0, where there are none."""
    top_ids: Int[Tensor, "tokens top_k"] | None = None
    """The likeliest tokens, likeliest first."""
    top_logprobs: Float[Tensor, "tokens top_k"] | None = None
    top_rest_logprobs: Float[Tensor, "tokens"] | None = None


def _likeliest(local: Tensor, k: int, group: dist.ProcessGroup | None) -> Tensor:
    size = local.shape[1]
    values, ids = local.topk(min(k, size))
    if group is None:
        return ids
    values, ids = _joined(values, group), _joined(ids + dist.get_rank(group) * size, group)
    return ids.gather(-1, values.topk(k).indices)


def _joined(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)


def _reduced(
    values: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM
) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op, group=group)
    return values


def _log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return logits.log_softmax(-1)
    shifted = logits - _reduced(logits.amax(-1, keepdim=True), group, dist.ReduceOp.MAX)
    return shifted.sub_(_reduced(shifted.exp().sum(-1, keepdim=True), group).log())


def _log_rest(
    every: Tensor, places: Tensor, own: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """log Σ exp over all but the places that are this rank's `own`."""
    others = every.scatter_add(1, places, torch.where(own, -math.inf, 0.0).to(every.dtype))
    top = _reduced(others.amax(-1), group, dist.ReduceOp.MAX)
    top = torch.where(top == -math.inf, 0.0, top)
    return _reduced(others.sub_(top[:, None]).exp_().sum(-1), group).log() + top


class _Gradients:
    """Gradients of a head's outputs, and with them that of logits z: d log p(y) = 1[y] − p, dH =
    −p (log p + H), and of the mass R outside a set S d log R = 1[∉ S] p / R − p.

    `sets`: of `_sets`. `first`, `size`: this rank's part of the vocabulary.
    """

    def __init__(
        self, grads: Any, kind: LogprobKind, entropies: Tensor, sets: Any, first: int, size: int
    ) -> None:
        scaled = [None if grad is None else grad / kind.temperature for grad in grads]
        self.filtered, self.first, self.size = kind.filtered, first, size
        self.token, self.entropy = (None if g is None else g[:, None] for g in scaled[:2])
        self.offset = torch.zeros_like(entropies)[:, None]
        if self.token is not None:
            self.offset = self.offset - self.token
        if self.entropy is not None:
            self.offset = self.offset - self.entropy * entropies[:, None]
        self.at: list[Any] = []
        self.rest: list[Any] = []
        for i in range(len(sets) // 3):
            ids, logprobs, rest = sets[3 * i : 3 * i + 3]
            at, outside = scaled[2 + 2 * i : 4 + 2 * i]
            own, places = _own(ids, first, size)
            if at is not None:
                at = torch.where(logprobs == -math.inf, 0.0, at)
                self.offset = self.offset - at.sum(-1, keepdim=True)
                self.at.append((places, torch.where(own, at, 0.0)))
            if outside is not None:
                none = (rest == -math.inf)[:, None]
                outside = torch.where(none, 0.0, outside[:, None])
                self.offset = self.offset - outside
                hidden = torch.where(own & ~none, -math.inf, 0.0).to(rest.dtype)
                self.rest.append((places, hidden, torch.where(none, 0.0, rest[:, None]), outside))

    def logits(self, every: Tensor, rows: slice) -> Tensor:
        """Return a chunk's gradient but for the one-hot terms, from its log-probabilities."""
        factor = self.offset[rows]
        if self.entropy is not None:
            finite = _finite(every) if self.filtered else every
            factor = torch.addcmul(factor, -self.entropy[rows], finite)
        grad = every.exp() * factor
        for places, hidden, rest, outside in self.rest:
            others = every.scatter_add(1, places[rows], hidden[rows])
            grad = grad.addcmul_(others.sub_(rest[rows]).exp_(), outside[rows])
        return grad

    def add_one_hot(self, grad: Tensor, ids: Tensor, rows: slice) -> Tensor:
        if self.token is not None:
            own, place = _own(ids, self.first, self.size)
            token = torch.where(own[:, None], self.token[rows], 0.0)
            grad = grad.scatter_add_(1, place[:, None], token)
        for places, at in self.at:
            grad = grad.scatter_add_(1, places[rows], at[rows])
        return grad


def _own(ids: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Which ids are among this rank's `size` ones, and where."""
    place = ids - first
    return (place >= 0) & (place < size), place.clamp(0, size - 1)


def _sets(targets: Tensor | None, output: Any) -> list[Tensor]:
    """Each set's ids, log-probabilities and log of the rest: the targets', the likeliest ones'."""
    found = [] if targets is None else [targets, *output[2:4]]
    return [*found, output[-1], *output[-3:-1]] if len(output) % 2 else found


class _LinearLogprobs(torch.autograd.Function):
    """With a group: of a rank's rows of the head; the gradient of `hidden` is its summand.

    In place changes only what no second derivative and no `vmap` has to remember.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden, weight, ids, targets, group, kind, chunk, dtype, with_entropy, softcap, top_k
    ):
        found: list[Any] = []
        first, size = _first_row(weight, group), len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            for start in range(0, max(len(hidden), 1), chunk):
                rows = slice(start, start + chunk)
                h, y = hidden[rows].to(dtype), ids[rows]
                logits = _capped(at_least_float32(h @ head.t()), softcap)
                logits = _local_logits(logits, y, group, kind)
                top = (_likeliest(logits, top_k, group),) if top_k else ()
                every = _log_softmax(logits, group)
                del logits
                entropies = torch.zeros_like(every[:, :1])
                if with_entropy:
                    finite = _finite(every) if kind.filtered else every
                    entropies = -every.exp().mul_(finite).sum(-1, keepdim=True)
                    del finite
                asked = y[:, None], *(() if targets is None else (targets[rows],)), *top
                own, places = _own(torch.cat(asked, -1), first, size)
                parts = torch.where(own, every.gather(-1, places), 0.0)
                parts = _reduced(torch.cat([entropies, parts], -1), group)
                widths = [ids.shape[1] for ids in asked]
                logprobs, *sets = parts[:, 1:].split(widths, -1)
                chunk_found = [logprobs[:, 0], parts[:, 0]]
                _, *own = own.split(widths, -1)
                _, *places = places.split(widths, -1)
                for at, where, mine in zip(sets, places, own, strict=True):
                    chunk_found += at, _log_rest(every, where, mine, group)
                found.append((*chunk_found, *top))
                del every  # one [chunk, vocab] array less at the peak
        return tuple(map(torch.cat, zip(*found, strict=True)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, ids, targets, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, ids, output[1], *_sets(targets, output))
        if ctx.options[-1]:
            ctx.mark_non_differentiable(output[-1])

    @staticmethod
    def backward(ctx, *grads: Any):
        hidden, weight, ids, entropies, *sets = ctx.saved_tensors
        group, kind, chunk, dtype, _, softcap, _ = ctx.options
        of = _Gradients(grads, kind, entropies, sets, _first_row(weight, group), len(weight))
        grad_hidden, grad_weight = [], None
        final = not torch.is_grad_enabled()  # no second derivative: sums may grow in place
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            # Without tokens: one empty chunk, and gradients of zeros.
            for start in range(0, max(len(hidden), 1), chunk):
                rows = slice(start, start + chunk)
                h, y = hidden[rows].to(dtype), ids[rows]
                capped = _capped(at_least_float32(h @ head.t()), softcap)
                logits = _local_logits(capped, y, group, kind)
                slope = None if softcap is None else 1 - (capped / softcap) ** 2
                del capped
                if group is None and of.entropy is None and not of.rest:
                    grad = logits.softmax(-1) * of.offset[rows]
                    del logits
                else:
                    every = _log_softmax(logits, group)
                    del logits
                    grad = of.logits(every, rows)
                    del every
                grad = of.add_one_hot(grad, y, rows)
                if slope is not None:
                    grad = grad * slope
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
            *[None] * 9,
        )


def _first_row(weight: Tensor, group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group) * len(weight)


def _local_logits(
    local: Tensor, ids: Tensor, group: dist.ProcessGroup | None, kind: LogprobKind
) -> Tensor:
    if group is None or not kind.filtered:
        return _filtered(local, kind, ids)
    whole = _filtered(_joined(local, group), kind, ids)  # filters need the whole vocabulary
    return whole.split(local.shape[1], -1)[dist.get_rank(group)]


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


def flat_linear_logprobs(
    states: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "rows hidden"],
    ids: Int[Tensor, "tokens"],
    *,
    kind: LogprobKind = LogprobKind(),
    chunk: int = 1024,
    with_entropy: bool = False,
    softcap: float | None = None,
    targets: Int[Tensor, "tokens k"] | None = None,
    top_k: int = 0,
    group: dist.ProcessGroup | None = None,
) -> HeadOutputs:
    """Return log p(ids), unshifted, under p = softmax(states @ weight.T), and what else is asked
    for, in the same pass over chunks.

    targets: ids whose log p, and that of all others together, are returned; they may repeat.
    top_k: of how many of the likeliest tokens the same is returned, with their ids.
    group: ranks that have equally many rows of the head each, in their order. With the same states
    all get the same result and, if all go on to the same loss, the gradient of their rows, but
    only their summand of the gradient of `states`, which the caller sums.
    Other arguments: as `linear_token_logprobs`.
    Raises: ValueError unless chunk >= 1 and 0 <= top_k <= vocab.

    >>> states, weight = torch.ones(1, 1), torch.tensor([[0.25], [0.75]]).log()
    >>> found = flat_linear_logprobs(states, weight, torch.tensor([0]), top_k=1)
    >>> found.top_ids.tolist(), found.top_rest_logprobs.exp().tolist()
    ([[1]], [0.25])
    """
    at_least(1, chunk=chunk)
    vocabulary = len(weight) * (1 if group is None else dist.get_world_size(group))
    require(
        0 <= top_k <= vocabulary,
        "top_k",
        f"must be from 0 to the vocabulary's {vocabulary}",
        top_k,
        "ask for fewer tokens, or 0 for none",
    )
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    options = (group, kind, chunk, dtype, with_entropy, softcap, top_k)
    targets = None if targets is None else targets.long()
    found = _LinearLogprobs.apply(states, weight, ids.long(), targets, *options)
    given, top = found[2:4] if targets is not None else (None, None), found[-3:] if top_k else ()
    return HeadOutputs(*found[:2], *given, *((top[2], top[0], top[1]) if top else ()))


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
    logprobs, entropies, *_ = flat_linear_logprobs(
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

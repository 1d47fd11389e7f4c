"""The numbers that every plan must give: plain PyTorch over the Hugging Face model, a sequence at a
time, with the losses as their papers have them.
"""

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.models.tensor_files import as_stored, stored_names
from tests.parallel.parity import losses
from tests.parallel.parity.golden import (
    LORA_ALPHA,
    LORA_RANK,
    VOCAB,
    Problem,
    golden_batch,
    make_model,
)

STEPS = 3
LR, WEIGHT_DECAY, BETAS, EPS = 1e-3, 0.1, (0.9, 0.95), 1e-4
"""Adam divides by the root of the gradient's square: with a tiny eps the sign of a gradient that is
0 but for rounding would move a weight by lr.
"""
MAX_GRAD_NORM = 0.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case is judged by; arrays of tokens are in the golden batch's layout."""

    logprobs: Tensor
    """Without gradient, before the first step; 0 off the response mask."""
    token_logprobs: Tensor
    """As the loss sees them in the first step; 0 off the loss mask."""
    entropy: Tensor
    losses: tuple[float, ...]
    """Of every step; so are the norms, before clipping."""
    grad_norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    """Of the first step, before clipping; of what is trained."""
    weights: dict[str, Tensor]
    """After the last step."""
    after: Tensor
    """`logprobs` after the last step."""
    sets: dict[str, Tensor]
    """Of the likeliest and of target tokens, as `logprobs`."""


def forced(experts: Tensor, router: Any, _: Any, output: Any) -> Any:
    """What a router of Hugging Face's returns if tokens go through these experts, but for -1."""
    logits, _, own = output
    experts = torch.where(experts < 0, own, experts.long())
    weights = logits.softmax(-1).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


def sequence_logprobs(
    model: nn.Module, ids: Tensor, kind: LogprobKind, experts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log p, entropy and log p of all tokens in the place of each one of a sequence, 0 for the
    first, under `kind`.
    """
    with ExitStack() as stack:
        if experts is not None:
            routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
            for layer, router in enumerate(routers):
                hook = router.register_forward_hook(partial(forced, experts[:, layer]))
                stack.callback(hook.remove)
            assert len(routers) == experts.shape[1]
        logits = model(ids[None], use_cache=False).logits[0, :-1].float() / kind.temperature
    ranked = logits.detach().sort(-1, descending=True).values
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if kind.min_p:
        allowed &= logits.detach() >= ranked[:, :1] + math.log(kind.min_p)
    if kind.top_k:
        allowed &= logits >= ranked[:, kind.top_k - 1 : kind.top_k]
    if kind.top_p < 1:
        among = torch.where(allowed, logits.detach(), -torch.inf).softmax(-1)
        above = logits[:, None, :] > logits[:, :, None]
        allowed &= (among[:, None, :] * above).sum(-1) < kind.top_p
    allowed = allowed.scatter(-1, ids[1:, None], True)
    logprobs = torch.where(allowed, logits, -torch.inf).log_softmax(-1)
    finite = torch.where(allowed, logprobs, 0.0)
    entropy = -torch.where(allowed, finite.exp() * finite, 0.0).sum(-1)
    found = logprobs.gather(-1, ids[1:, None])[:, 0], entropy, logprobs
    first, second, third = (torch.cat([x.new_zeros(1, *x.shape[1:]), x]) for x in found)
    return first, second, third


def forward(model: nn.Module, batch: TokenBatch, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same for all sequences of a batch, one after the other; log p is of its targets."""
    shape = batch.input_ids.shape
    found: Any = torch.zeros(shape), torch.zeros(shape), torch.zeros(*shape, VOCAB)
    autocast: AbstractContextManager[Any] = (
        torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()
    )
    for row, segments in enumerate(batch.segment_ids):
        for segment in range(1, int(segments.max()) + 1):
            places = (segments == segment).nonzero()[:, 0]
            with autocast:
                values = sequence_logprobs(
                    model,
                    batch.input_ids[row, places],
                    batch.logprob_kind,
                    None if batch.routed_experts is None else batch.routed_experts[row, places],
                )
            found = [
                old.index_put((torch.tensor(row), places), new)
                for old, new in zip(found, values, strict=True)
            ]
    logprobs, entropies, every = found
    if batch.target_weights is not None:
        logprobs = (batch.target_weights * every.gather(-1, batch.target_ids)).sum(-1)
    return logprobs, entropies, every


def sets_of(every: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """What `Needs` of the loss soft gives, from all log-probabilities."""
    if batch.target_ids is None:
        return {}
    top, found = every.detach().sort(dim=-1, descending=True, stable=True).indices, {}
    found["top_ids"] = top[..., : losses.TOP]
    for name, ids in (("top", found["top_ids"]), ("target", batch.target_ids)):
        inside = torch.zeros_like(every).scatter(-1, ids, 1.0) > 0
        found[f"{name}_logprobs"] = every.gather(-1, ids)
        found[f"{name}_rest_logprobs"] = every.masked_fill(inside, -torch.inf).logsumexp(-1)
    return found


def _policy(logprobs: Tensor, entropy: Tensor, batch: TokenBatch, _: Tensor) -> Tensor:
    mask, weight = batch.loss_mask, 1 / batch.loss_mask.sum()
    ratio = (logprobs - batch.prev_logprobs).exp()
    a = batch.advantages
    token = torch.maximum(-a * ratio, -a * ratio.clamp(1 - losses.CLIP_LOW, 1 + losses.CLIP_HIGH))
    token = torch.where(a < 0, torch.minimum(token, -a * losses.DUAL_CLIP), token)
    total = token[mask].sum()
    for row in range(len(batch)):
        s = (logprobs - batch.prev_logprobs)[row][mask[row]]
        if len(s):
            ratio, advantage = s.mean().exp(), a[row, 0]
            clip = ratio.clamp(1 - losses.SEQUENCE_CLIP, 1 + losses.SEQUENCE_CLIP)
            total = total + len(s) * torch.maximum(-advantage * ratio, -advantage * clip)
    d = (batch.reference_logprobs - logprobs)[mask]
    return weight * (
        total + losses.KL_COEF * (d.exp() - 1 - d).sum() - losses.ENTROPY_COEF * entropy[mask].sum()
    )


def _pairs(logprobs: Tensor, entropy: Tensor, batch: TokenBatch, _: Tensor) -> Tensor:
    difference = torch.where(batch.loss_mask, logprobs - batch.reference_logprobs, 0.0)
    chosen, rejected = (
        torch.where(batch.segment_ids == segment, difference, 0.0).sum(-1) for segment in (1, 2)
    )
    return -logsigmoid(losses.BETA * (chosen - rejected)).mean()


def _nll(logprobs: Tensor, entropy: Tensor, batch: TokenBatch, _: Tensor) -> Tensor:
    return -logprobs[batch.loss_mask].mean()


def _soft(logprobs: Tensor, entropy: Tensor, batch: TokenBatch, every: Tensor) -> Tensor:
    mask, sets = batch.loss_mask, sets_of(every, batch)
    more = [(i + 1) * sets[name][mask].sum() for i, name in enumerate(losses.SETS)]
    return -logprobs[mask].mean() + 0.02 * torch.stack(more).sum() / mask.sum()


LOSSES = {"policy": _policy, "pairs": _pairs, "nll": _nll, "soft": _soft}


@cache
def reference(problem: Problem) -> Outcome:
    """Three steps of AdamW, with clipping and weight decay on matrices."""
    batch, model = golden_batch(problem), make_model(problem).train()
    if problem.lora:
        torch.manual_seed(0)
        lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear")
        model = get_peft_model(model, lora)  # type: ignore[assignment]
    parameters = {
        name.removeprefix("base_model.model."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    groups = [
        {"params": [p], "weight_decay": WEIGHT_DECAY if p.ndim > 1 else 0.0}
        for p in parameters.values()
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    with torch.no_grad():
        logprobs, _, every = forward(model, batch, problem.dtype)
        before, mask = torch.where(batch.response_mask, logprobs, 0.0), batch.response_mask
        free = {"top_logprobs": -torch.inf}
        sets = {
            name: torch.where(mask.view(*mask.shape, *(1,) * (x.ndim - 2)), x, free.get(name, 0))
            for name, x in sets_of(every, batch).items()
        }
    values, norms, first, gradients = [], [], None, {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logprobs, entropy, every = forward(model, batch, problem.dtype)
        loss = LOSSES[problem.loss](logprobs, entropy, batch, every)
        loss.backward()
        if step == 0:
            first = [torch.where(batch.loss_mask, x.detach(), 0.0) for x in (logprobs, entropy)]
            gradients = {
                name: p.grad.clone() for name, p in parameters.items() if p.grad is not None
            }
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        values.append(float(loss.detach()))
        optimizer.step()
    assert first is not None and gradients.keys() == parameters.keys()
    with torch.no_grad():
        after = torch.where(batch.response_mask, forward(model, batch, problem.dtype)[0], 0.0)
    whole = model.merge_and_unload() if problem.lora else model  # type: ignore[operator]
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    stored = stored_names(whole)
    return Outcome(
        logprobs=before,
        token_logprobs=first[0],
        entropy=first[1],
        losses=tuple(values),
        grad_norms=tuple(norms),
        gradients=dict(as_stored(gradients.items(), stored)),
        weights=dict(as_stored(weights.items(), stored)),
        after=after,
        sets=sets,
    )

"""Receipts: sums by which a run proves that what it trains on is what was sampled."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from nemorl.losses.types import (
    MAX_LOG_RATIO,
    Metrics,
    PerToken,
    Sum,
    TokenIds,
    TokenMask,
    bounded_exp,
    masked,
    mean_of,
)

BITS = 0xFFFFFFFF
"""Hashes are integers from 0 to 2^32 − 1, in int64: no product below overflows."""
FIRST_DEPTHS = tuple(4**power for power in range(12))
"""Where the parts of a response begin that `gap_by_depth` measures apart."""


def _mixed(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return a permutation of 0 … 2^32 − 1 in which each bit depends on all (xorshift-multiply)."""
    for _ in range(2):
        values = ((values ^ (values >> 16)) * 0x45D9F3B) & BITS
    return values ^ (values >> 16)


def token_hashes(
    input_ids: TokenIds, position_ids: TokenIds, generation_logprobs: PerToken
) -> Int[Tensor, "batch seq"]:
    """Return a 32-bit hash of each token, as int64: of all ids of its sequence up to it with their
    positions, and of the bits of its own log-probability in float32.

    With m a mixing permutation of 32-bit integers, h_t = m(Σ_{s ≤ t} m(m(x_s) + s) ⊕ m(bits of
    log π_t)), sums modulo 2^32.

    >>> row = torch.tensor([[5, 6, 5, 6]]), torch.tensor([[0, 1, 0, 1]]), torch.zeros(1, 4)
    >>> hashes = token_hashes(*row)  # of two equal sequences
    >>> torch.equal(hashes[:, :2], hashes[:, 2:])
    True
    """
    positions = position_ids.long()
    own = _mixed((_mixed(input_ids.long() & BITS) + positions) & BITS)
    through = own.cumsum(-1)
    place = torch.arange(own.shape[-1], device=own.device)
    first = (place - positions).clamp(0, max(own.shape[-1] - 1, 0))
    before = (through - own).gather(-1, first)
    bits = generation_logprobs.detach().float().contiguous().view(torch.int32).long() & BITS
    return _mixed(((through - before) & BITS) ^ _mixed(bits))


def token_receipt(
    input_ids: TokenIds,
    position_ids: TokenIds,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
) -> Metrics:
    """Return the number of tokens in `loss_mask` and the sum of their hashes modulo 2^32, as the
    metrics `receipts/tokens` and `receipts/hash`.

    Both add over microbatches and ranks, exactly. Compare hashes modulo 2^32.

    >>> ids, places = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]])
    >>> logprobs, mask = torch.tensor([[0.0, -0.5, -0.25]]), torch.tensor([[False, True, True]])
    >>> found = token_receipt(ids, places, logprobs, mask)
    >>> found["receipts/tokens"].finalize()
    2.0
    """
    hashes = token_hashes(input_ids, position_ids, generation_logprobs)
    total = torch.where(loss_mask, hashes, 0).sum() & BITS
    return {"receipts/tokens": _exact(loss_mask.sum()), "receipts/hash": _exact(total)}


def _exact(count: Int[Tensor, ""]) -> Sum:
    """In main memory where the device has no float64 (mps)."""
    return Sum((count.cpu() if count.device.type == "mps" else count).double())


def support_ratio(
    prev_logprobs: PerToken, generation_logprobs: PerToken, loss_mask: TokenMask
) -> Metrics:
    """Return means of w = π_prev/π_gen and of (w − 1)² over the tokens whose sampler logprob is
    finite, as `receipts/support_ratio` and `receipts/support_square`.

    E[w] over tokens that π_gen draws is Σ π_prev over what π_gen can draw: 1 where both keep the
    same tokens, less where the trainer keeps more.
    Source: TRL issue 7269, where supports that differ gave 0.896.

    >>> prev, generation = torch.tensor([[0.45, 0.45]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> found = support_ratio(prev, generation, torch.ones(1, 2, dtype=torch.bool))
    >>> round(found["receipts/support_ratio"].finalize(), 6)
    0.9
    """
    usable = loss_mask & generation_logprobs.isfinite()
    gap = masked(usable, prev_logprobs.detach()) - masked(usable, generation_logprobs.detach())
    ratio = bounded_exp(gap)
    return {
        "receipts/support_ratio": mean_of(ratio, usable),
        "receipts/support_square": mean_of((ratio - 1).square(), usable),
    }


def gap_by_depth(
    prev_logprobs: PerToken,
    generation_logprobs: PerToken,
    loss_mask: TokenMask,
    response_mask: TokenMask,
    segment_ids: TokenIds,
) -> Metrics:
    """Return the mean of eᵈ − 1 − d, with d = log π_prev − log π_gen, for tokens at several depths:
    `receipts/kl_from_1` of the first three tokens of responses, `receipts/kl_from_4` of the next
    twelve, `receipts/kl_from_16`, …, each part four times as long as the one before.

    >>> row, ones = torch.zeros(1, 6), torch.ones(1, 6, dtype=torch.long)
    >>> list(gap_by_depth(row, row, ones > 0, ones > 0, ones))
    ['receipts/kl_from_1', 'receipts/kl_from_4']
    """
    usable = loss_mask & generation_logprobs.isfinite()
    gap = masked(usable, prev_logprobs.detach()) - masked(usable, generation_logprobs.detach())
    error = gap.clamp(max=MAX_LOG_RATIO).expm1() - gap
    real = segment_ids > 0
    begins = [first for first in FIRST_DEPTHS if first <= max(segment_ids.shape[1] - 1, 1)]
    inside = (real & response_mask).long().cumsum(-1)
    start = real & response_mask & ~_after_response(response_mask, segment_ids)
    before = torch.where(start, inside - 1, 0).cummax(-1).values
    depth = inside - before
    ends = [*begins[1:], math.inf]
    return {
        f"receipts/kl_from_{first}": mean_of(error, usable & (depth >= first) & (depth < end))
        for first, end in zip(begins, ends, strict=True)
    }


def _after_response(response_mask: TokenMask, segment_ids: TokenIds) -> TokenMask:
    before = torch.nn.functional.pad(response_mask[:, :-1], (1, 0))
    same = torch.nn.functional.pad(segment_ids[:, :-1], (1, 0)) == segment_ids
    return before & same & (segment_ids > 0)

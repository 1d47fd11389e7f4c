"""PyTorch's attention for sequences of any lengths on a CPU, which has no kernel of it: by its
definition, behind the operators that `varlen_attn` and its gradient call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import varlen

CAUSAL = [-1, 0]
"""Window of all tokens before and none after."""


@dataclass(frozen=True)
class Call:
    """What the kernel was asked for."""

    cu_seqlens: list[int]
    longest: int
    heads: tuple[int, int]
    scale: float | None
    dtype: torch.dtype


CALLS: list[Call] = []


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v of each sequence, its logarithms of sums `[heads, tokens]`,
    and the state of no dropout; an argument that would change this is refused.
    """
    assert cu_seq_k is not None and torch.equal(cu_seq_q, cu_seq_k)
    assert is_causal == (window_size == CAUSAL)
    window = back_of(window_size)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert seqused_k is block_table is num_splits is None
    heads = query.shape[1], key.shape[1]
    CALLS.append(Call(cu_seq_q.tolist(), max_q, heads, scale, query.dtype))
    outputs, sums = [], []
    for q, k, v in sequences(query, key, value, rows=(cu_seq_q, max_q, max_k)):
        scores = scores_of(q, k, scale, window)
        sums.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    random_state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outputs).to(query.dtype), torch.cat(sums, 1), random_state


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert is_causal == (window_size == CAUSAL)
    window = back_of(window_size)
    gradients, place = [], 0
    inputs = (query, key, value, grad_out, out)
    for q, k, v, grad, output in sequences(*inputs, rows=(cu_seq_q, max_q, max_k)):
        own = lse[:, place : (place := place + len(q)), None]
        weights = (scores_of(q, k, scale, window) - own).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad, v)
        mean = (grad * output).sum(-1).t()[..., None]
        of_scores = weights * (of_weights - mean) * (q.shape[2] ** -0.5 if scale is None else scale)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, q)
        of_value = torch.einsum("hqk,qhd->khd", weights, grad)
        many = (len(k), key.shape[1], -1, k.shape[2])  # query heads that share a key head
        gradients.append(
            (
                torch.einsum("hqk,khd->qhd", of_scores, k),
                *(x.view(many).sum(2) for x in (of_key, of_value)),
            )
        )
    found = (torch.cat(parts).to(query.dtype) for parts in zip(*gradients, strict=True))
    return tuple(found)  # type: ignore[return-value]


def sequences(*inputs: Tensor, rows: tuple[Tensor, int, int]) -> Iterator[list[Tensor]]:
    cu_seqlens, *longest = rows
    lengths = cu_seqlens.diff().tolist()
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and cu_seqlens[0] == 0
    assert sum(lengths) == len(inputs[0]) and longest == [max(lengths)] * 2 and min(lengths) > 0
    assert len({x.dtype for x in inputs}) == 1 and all(x.stride(-1) == 1 for x in inputs[:3])
    for own in zip(*(x.split(lengths) for x in inputs), strict=True):
        wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in own)
        yield [x.repeat_interleave(own[0].shape[1] // x.shape[1], 1) for x in wide]


def back_of(window_size: list[int] | None) -> int:
    """Return how many earlier tokens a token sees."""
    assert window_size is not None and window_size[1] == 0
    return window_size[0] if window_size[0] >= 0 else 1 << 30


def scores_of(query: Tensor, key: Tensor, scale: float | None, window: int) -> Tensor:
    scale = query.shape[2] ** -0.5 if scale is None else scale
    back = torch.arange(len(query))[:, None] - torch.arange(len(key))
    hidden = (back < 0) | (back > window)
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, -torch.inf)


@contextmanager
def used_on_cpus() -> Iterator[list[Call]]:
    """Have both training backends compute attention by `varlen_attn`; yields its calls."""
    from nemorl.parallel.dtensor import backend
    from nemorl.parallel.megatron import pipeline

    kernel: Any = "varlen_attn"
    CALLS.clear()
    with ExitStack() as stack:
        for module in (backend, pipeline):
            stack.enter_context(patch.object(module, "kernel_of", lambda *_, **__: kernel))
        yield CALLS

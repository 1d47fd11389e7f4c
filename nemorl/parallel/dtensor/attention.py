"""Causal attention in which each segment of a row sees only itself, as an attention function of `transformers`.

A dense block-diagonal mask costs the square of the row's length. Here segments of similar length are gathered into a small batch per power of two, so
that the cost is that of the segments alone, on every device and with every kernel that scaled-dot-product attention picks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "nemorl_segments"


def segment_buckets(segment_ids: Int[Tensor, "batch seq"]) -> list[Int[Tensor, "segments length"]] | None:
    """For packed rows: per power of two, the flat token indices of the segments of about that length, one a row. None where each row is one segment.

    Short segments are filled up with the index batch·seq, one past the last token. Padding belongs to no segment and is never attended to.

    >>> [bucket.tolist() for bucket in segment_buckets(torch.tensor([[1, 1, 1, 2, 0]]))]
    [[[3]], [[0, 1, 2, 5]]]
    """
    rows, seq = segment_ids.shape
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    if bool(((starts & (segment_ids > 0)).sum(-1) <= 1).all()):
        return None
    begins = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(begins, append=begins.new_tensor([rows * seq]))
    real = segment_ids.flatten()[begins] > 0
    begins, lengths = begins[real], lengths[real]
    exponents = (lengths.double().log2().ceil()).long()
    buckets = []
    for exponent in sorted(set(exponents.tolist())):
        inside = exponents == exponent
        offsets = torch.arange(2**exponent, device=segment_ids.device)
        index = begins[inside, None] + offsets
        buckets.append(torch.where(offsets < lengths[inside, None], index, rows * seq))
    return buckets


def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_buckets: Sequence[Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`[batch, heads, seq, head_dim]` to `[batch, seq, heads, head_dim]`: masked if there is a mask (decoding), else causal by segment."""
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if attention_mask is not None or segment_buckets is None:
        causal = attention_mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError("several new tokens after cached ones need an attention mask: set the model's attention implementation back to sdpa")
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, is_causal=causal, **options)
        return rearrange(output, "batch heads seq dim -> batch seq heads dim").contiguous(), None
    flat = [rearrange(x, "batch heads seq dim -> (batch seq) heads dim") for x in (query, key, value)]
    flat = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in flat]  # the last one is what buckets are filled up with
    outputs = []
    for index in segment_buckets:
        q, k, v = (rearrange(x[index], "segments length heads dim -> segments heads length dim") for x in flat)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        outputs.append(rearrange(attended, "segments heads length dim -> (segments length) heads dim"))
    places = torch.cat([index.flatten() for index in segment_buckets])
    output = torch.zeros_like(flat[0]).index_copy(0, places, torch.cat(outputs))
    return rearrange(output[:-1], "(batch seq) heads dim -> batch seq heads dim", batch=query.shape[0]), None


def register_attention() -> None:
    """Make the function known to `transformers`. There is no mask function of that name, so that no mask is ever built behind our back."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, segment_attention)

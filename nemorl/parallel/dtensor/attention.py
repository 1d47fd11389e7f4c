"""Causal attention in which each segment of a row sees only itself, as an attention function of
`transformers`.

A dense block-diagonal mask costs the square of the row's length. Here segments of similar length
are gathered into small batches, so that the cost is that of the segments alone, on every device and
with every kernel that scaled-dot-product attention picks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "nemorl_segments"


@dataclass(frozen=True)
class SegmentBuckets:
    """Where the segments of packed rows are: per bucket their tokens, and where each token is in
    the buckets laid end to end.

    A place that a shorter segment leaves free in its bucket holds the segment's last token once
    more. It comes after all the others, so that none of them sees it, and nobody reads it. A token
    of the padding has the last place of all, one past the buckets' own.
    """

    tokens: tuple[Int[Tensor, "_ _"], ...]
    places: Int[Tensor, "_"]


def segment_buckets(segment_ids: Int[Tensor, "batch seq"]) -> SegmentBuckets | None:
    """The flat token indices of the segments of packed rows, in buckets of similar length. None
    where each row is one segment.

    Lengths are rounded up to four steps per power of two, and a bucket is as long as its longest
    segment: at most a quarter is wasted, and there are few buckets whatever the lengths. Padding
    belongs to no segment and is never attended to.

    >>> buckets = segment_buckets(torch.tensor([[1, 1, 1, 2, 0]]))
    >>> [tokens.tolist() for tokens in buckets.tokens], buckets.places.tolist()
    ([[[3]], [[0, 1, 2]]], [1, 2, 3, 0, 4])
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
    steps = 2 ** ((lengths.double().log2().floor() - 2).clamp(min=0)).long()
    rounded = -(-lengths // steps) * steps
    buckets = []
    for size in rounded.unique().tolist():
        inside = rounded == size
        longest = int(lengths[inside].max())
        offsets = torch.arange(longest, device=segment_ids.device)
        buckets.append(begins[inside, None] + torch.minimum(offsets, lengths[inside, None] - 1))
    return SegmentBuckets(tuple(buckets), _places(buckets, rows * seq))


def _places(buckets: Sequence[Tensor], num_tokens: int) -> Tensor:
    """The first place of each token in the buckets laid end to end; for tokens in none of them one
    place more than there are.
    """
    tokens = torch.cat([bucket.flatten() for bucket in buckets])
    places = tokens.new_full((num_tokens,), len(tokens))
    return places.scatter_reduce(0, tokens, torch.arange(len(tokens), device=tokens.device), "amin")


@torch.compiler.disable  # it would be compiled anew for each way in which segments can lie
def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_buckets: SegmentBuckets | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`[batch, heads, seq, head_dim]` to `[batch, seq, heads, head_dim]`: masked if there is a mask
    (decoding), else causal by segment.
    """
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if attention_mask is not None or segment_buckets is None:
        causal = attention_mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                "several new tokens after cached ones need an attention mask: set the model's"
                " attention implementation back to sdpa"
            )
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, **options
        )
        return rearrange(output, "batch heads seq dim -> batch seq heads dim").contiguous(), None
    flat = [
        x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (query, key, value)
    ]  # [tokens, heads · head_dim]
    outputs = []
    for tokens in segment_buckets.tokens:
        q, k, v = (
            x.index_select(0, tokens.flatten())
            .view(*tokens.shape, -1, query.shape[-1])
            .transpose(1, 2)
            for x in flat
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        outputs.append(attended.transpose(1, 2).reshape(tokens.numel(), -1))
    outputs.append(outputs[0].new_zeros(1, outputs[0].shape[1]))  # what padding gets
    output = torch.cat(outputs).index_select(0, segment_buckets.places)
    batch, heads, seq, dim = query.shape
    return output.view(batch, seq, heads, dim), None


def register_attention() -> None:
    """Make the function known to `transformers`.

    There is no mask function of that name, so that no mask is ever built behind our back.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, segment_attention)

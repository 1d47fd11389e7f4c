"""Causal attention in which each segment of a packed row sees only itself.

Segments of similar length are gathered into small batches; a dense block-diagonal mask would cost
the square of the row's length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nemorl.models.attention import attend

ATTENTION_NAME = "nemorl_segments"


@dataclass(frozen=True)
class SegmentBuckets:
    """The segments of packed rows, in buckets of similar length.

    tokens: of each bucket the flat token indices, `[segments, longest]`. A shorter segment repeats
    its last token, which none of the others sees, and which is never read.
    places: the place of each token in the buckets laid end to end; one past the end for padding.
    """

    tokens: tuple[Int[Tensor, "_ _"], ...]
    places: Int[Tensor, "_"]


def segment_buckets(segment_ids: Int[Tensor, "batch seq"]) -> SegmentBuckets | None:
    """Return the buckets of packed rows, or None where each row is one segment.

    Lengths are rounded up to four steps per power of two: at most a quarter is wasted, in few
    buckets.

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
    tokens = torch.cat([bucket.flatten() for bucket in buckets])
    places = tokens.new_full((rows * seq,), len(tokens))
    order = torch.arange(len(tokens), device=tokens.device)
    return SegmentBuckets(tuple(buckets), places.scatter_reduce(0, tokens, order, "amin"))


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
    """Return `[batch, seq, heads, dim]` from `[batch, heads, seq, dim]`.

    Masked if there is a mask (decoding), else causal, within each segment.
    """
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if attention_mask is not None or segment_buckets is None:
        causal = attention_mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                "several new tokens after cached ones need an attention mask: set the model's"
                " attention implementation back to sdpa"
            )
        return attend(query, key, value, attention_mask, causal=causal, **options), None
    # [tokens, heads · dim]
    flat = [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (query, key, value)]
    outputs = []
    for tokens in segment_buckets.tokens:
        taken = (x.index_select(0, tokens.flatten()).view(*tokens.shape, -1) for x in flat)
        q, k, v = (x.unflatten(-1, (-1, query.shape[-1])).transpose(1, 2) for x in taken)
        outputs.append(attend(q, k, v, causal=True, **options).reshape(tokens.numel(), -1))
    outputs.append(outputs[0].new_zeros(1, outputs[0].shape[1]))  # what padding gets
    output = torch.cat(outputs).index_select(0, segment_buckets.places)
    batch, heads, seq, dim = query.shape
    return output.view(batch, seq, heads, dim), None

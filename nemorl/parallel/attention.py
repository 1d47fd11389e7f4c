"""Causal attention in which each segment of a packed row sees only itself.

Segments of similar length are gathered into small batches; a dense block-diagonal mask would cost
the square of the row's length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
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

    @classmethod
    def of(cls, tokens: tuple[Int[Tensor, "_ _"], ...], count: int) -> "SegmentBuckets":
        """Make them for `count` tokens; one that is in several segments is read in any of them."""
        laid = torch.cat([bucket.flatten() for bucket in tokens])
        places = laid.new_full((count,), len(laid))
        order = torch.arange(len(laid), device=laid.device)
        return cls(tokens, places.scatter_reduce(0, laid, order, "amin"))


def segments(segment_ids: Int[Tensor, "batch seq"]) -> tuple[Int[Tensor, "_"], Int[Tensor, "_"]]:
    """Return the first place of each segment in the flattened rows, and its length.

    >>> [found.tolist() for found in segments(torch.tensor([[1, 1, 1, 2, 0], [1, 0, 0, 0, 0]]))]
    [[0, 3, 5], [3, 1, 1]]
    """
    rows, seq = segment_ids.shape
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(begins, append=begins.new_tensor([rows * seq]))
    real = segment_ids.flatten()[begins] > 0
    return begins[real], lengths[real]


def segment_buckets(segment_ids: Int[Tensor, "batch seq"]) -> SegmentBuckets | None:
    """Return the buckets of packed rows, or None where each row is one segment.

    >>> buckets = segment_buckets(torch.tensor([[1, 1, 1, 2, 0]]))
    >>> [tokens.tolist() for tokens in buckets.tokens], buckets.places.tolist()
    ([[[3]], [[0, 1, 2]]], [1, 2, 3, 0, 4])
    """
    if bool((segment_ids <= 1).all()):
        return None
    return SegmentBuckets.of(tokens_in_buckets(*segments(segment_ids)), segment_ids.numel())


def tokens_in_buckets(
    begins: Int[Tensor, "_"], lengths: Int[Tensor, "_"]
) -> tuple[Int[Tensor, "_ _"], ...]:
    """Return the tokens of segments in buckets of similar length.

    Lengths are rounded up to four steps per power of two: at most a quarter is wasted, in few
    buckets.
    """
    steps = 2 ** ((lengths.double().log2().floor() - 2).clamp(min=0)).long()
    rounded = -(-lengths // steps) * steps
    buckets = []
    for size in rounded.unique().tolist():
        inside = rounded == size
        longest = int(lengths[inside].max())
        offsets = torch.arange(longest, device=lengths.device)
        buckets.append(begins[inside, None] + torch.minimum(offsets, lengths[inside, None] - 1))
    return tuple(buckets)


def segment_attention(
    query: Float[Tensor, "batch heads seq dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_buckets: SegmentBuckets | None = None,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """Return the attention of each token: with a mask (decoding) to what it shows, otherwise to
    the token itself and those before it in its segment.
    """
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if mask is not None or segment_buckets is None:
        causal = mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                "several new tokens after cached ones need an attention mask: set the model's"
                " attention implementation back to sdpa"
            )
        return attend(query, key, value, mask, causal=causal, **options)
    # [tokens, heads · dim]
    flat = [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (query, key, value)]
    outputs = []
    for tokens in segment_buckets.tokens:
        q, k, v = (
            x.index_select(0, tokens.flatten())
            .view(*tokens.shape, whole.shape[1], whole.shape[3])
            .transpose(1, 2)
            for x, whole in zip(flat, (query, key, value), strict=True)
        )
        outputs.append(attend(q, k, v, causal=True, **options).reshape(tokens.numel(), -1))
    outputs.append(outputs[0].new_zeros(1, outputs[0].shape[1]))  # what padding gets
    output = torch.cat(outputs).index_select(0, segment_buckets.places)
    batch, heads, seq, _ = query.shape
    return output.view(batch, seq, heads, value.shape[3])

"""Causal attention in which each segment of a packed row sees only itself.

On GPUs a kernel takes segments of all lengths at once. Elsewhere segments of similar length are
gathered into small batches: a dense block-diagonal mask would cost the square of the row's length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nemorl.checks import require
from nemorl.models.attention import PLAIN, Rule, attend
from nemorl.parallel.varlen import Kernel, varlen_attention

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


@dataclass(frozen=True)
class FlatSegments:
    """The segments of packed rows, laid end to end.

    tokens: the flat token indices, and `places`: the place of each token, one past the end for
    padding; None where the rows lie like this.
    cu_seqlens: the first place of each segment, and the end.
    longest: tokens of the longest segment, a number that no GPU is asked for.
    """

    tokens: Int[Tensor, "laid"] | None
    places: Int[Tensor, "_"] | None
    cu_seqlens: Int[Tensor, "_"]
    longest: int
    kernel: Kernel


Segments = SegmentBuckets | FlatSegments


def begins_and_lengths(
    segment_ids: Int[Tensor, "batch seq"],
) -> tuple[Int[Tensor, "_"], Int[Tensor, "_"]]:
    """Return the first place of each segment in the flattened rows, and its length.

    >>> ids = torch.tensor([[1, 1, 1, 2, 0], [1, 0, 0, 0, 0]])
    >>> [found.tolist() for found in begins_and_lengths(ids)]
    [[0, 3, 5], [3, 1, 1]]
    """
    rows, seq = segment_ids.shape
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(begins, append=begins.new_tensor([rows * seq]))
    real = segment_ids.flatten()[begins] > 0
    return begins[real], lengths[real]


def segments_of(segment_ids: Int[Tensor, "batch seq"], kernel: Kernel) -> Segments | None:
    """Return the segments of rows as a kernel takes them; None where each row is to be one.

    >>> buckets = segments_of(torch.tensor([[1, 1, 1, 2, 0]]), "buckets")
    >>> [tokens.tolist() for tokens in buckets.tokens], buckets.places.tolist()
    ([[[3]], [[0, 1, 2]]], [1, 2, 3, 0, 4])
    >>> flat = segments_of(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 2]]), "varlen_attn")
    >>> flat.tokens.tolist(), flat.cu_seqlens.tolist(), flat.longest
    ([0, 1, 4, 5, 6, 7], [0, 2, 5, 6], 3)
    """
    # A row whose tokens all see what is before them is one: with padding, on the right alone. With
    # a kernel for all lengths, that padding is left out, too.
    begins_late = (segment_ids[:, 1:] > segment_ids[:, :-1]).any()
    if not begins_late and bool((segment_ids <= (1 if kernel == "buckets" else 0)).all()):
        return None
    own = torch.arange(segment_ids.numel())
    return laid_out(*begins_and_lengths(segment_ids), own, len(own), kernel)


def laid_out(
    begins: Int[Tensor, "_"],
    lengths: Int[Tensor, "_"],
    place: Int[Tensor, "_"],
    count: int,
    kernel: Kernel,
) -> Segments:
    """Return segments as a kernel takes them.

    place: the index of each of the rows' tokens among the `count` that are computed. One that is in
    several segments is read in any of them.
    """
    if kernel == "buckets":
        buckets = tuple(place[tokens] for tokens in tokens_in_buckets(begins, lengths))
        laid = torch.cat([tokens.flatten() for tokens in buckets])
        return SegmentBuckets(buckets, _places(laid, count))
    ends = lengths.cumsum(0)
    shifts = (begins - ends + lengths).repeat_interleave(lengths)
    tokens = place[torch.arange(len(shifts)) + shifts]
    as_it_is = torch.equal(tokens, torch.arange(count))
    return FlatSegments(
        tokens=None if as_it_is else tokens,
        places=None if as_it_is else _places(tokens, count),
        cu_seqlens=pad(ends, (1, 0)).int(),
        longest=int(lengths.max()),
        kernel=kernel,
    )


def _places(laid: Int[Tensor, "laid"], count: int) -> Int[Tensor, "_"]:
    """Return the first place at which each of `count` tokens is laid, or one past the end."""
    places = laid.new_full((count,), len(laid))
    return places.scatter_reduce(0, laid, torch.arange(len(laid)), "amin")


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
    rule: Rule = PLAIN,
    segments: Segments | None = None,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """Return the attention of each token: with a mask (decoding) to what it shows, otherwise to
    what the rule shows of the token's segment.
    """
    if mask is not None or segments is None:
        causal = mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                "several new tokens after cached ones need an attention mask: set the model's"
                " attention implementation back to sdpa"
            )
        return attend(query, key, value, mask, rule=rule, causal=causal)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if isinstance(segments, FlatSegments):
        remedy = "set the model's attention_dropout to 0 before it is loaded"
        require(not rule.dropout, "attention's dropout", "must be 0 on a GPU", rule.dropout, remedy)
        output = _at_once(flat, segments, rule)
    else:
        output = _in_buckets(flat, segments.tokens, rule)
    if segments.places is not None:
        padding = output.new_zeros(1, output.shape[1])
        output = torch.cat((output, padding)).index_select(0, segments.places)
    batch, heads, seq, _ = query.shape
    return output.view(batch, seq, heads, value.shape[3])


def _at_once(
    flat: list[Float[Tensor, "tokens _ _"]], segments: FlatSegments, rule: Rule
) -> Float[Tensor, "laid width"]:
    # Autocast does not know these kernels; values come from a linear layer, which it knows, where
    # rotary angles leave queries and keys in float32.
    flat = [x.to(flat[2].dtype) for x in flat]
    if segments.tokens is not None:
        flat = [x.index_select(0, segments.tokens) for x in flat]
    rows: Any = (*flat, segments.cu_seqlens, segments.longest, rule)
    return varlen_attention(segments.kernel, *rows).flatten(1)


def _in_buckets(
    flat: list[Float[Tensor, "tokens _ _"]],
    buckets: tuple[Int[Tensor, "_ _"], ...],
    rule: Rule,
) -> Float[Tensor, "laid width"]:
    flat, outputs = [x.contiguous() for x in flat], []
    for tokens in buckets:
        qkv = (
            x.flatten(1)
            .index_select(0, tokens.flatten())
            .view(*tokens.shape, *x.shape[1:])
            .transpose(1, 2)
            for x in flat
        )
        outputs.append(attend(*qkv, rule=rule, causal=True).reshape(tokens.numel(), -1))
    return torch.cat(outputs)

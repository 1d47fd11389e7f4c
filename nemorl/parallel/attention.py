"""Causal attention in which each segment of a packed row sees only itself.

On GPUs a kernel takes segments of all lengths at once; elsewhere those of similar length are
gathered into small batches, as a dense mask would cost the square of the row's length.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from nemorl.checks import require
from nemorl.models.attention import PLAIN, Rule, attend
from nemorl.parallel.world import all_gather, exchange

Kernel = Literal["varlen_attn", "flash_attn", "buckets"]
KERNELS: tuple[Kernel, ...] = ("varlen_attn", "flash_attn")


def choose_kernel(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    *,
    head_dim: int,
    dropout: float,
    installed: Collection[Kernel],
) -> Kernel:
    """Return the kernel for segments: PyTorch's, flash-attn's, or dense attention over buckets of
    similar lengths.
    """
    fits = (
        capability is not None
        and capability >= (8, 0)
        and dtype in (torch.bfloat16, torch.float16)
        # Between 192 and 256 the gradient has no kernel on some GPUs.
        and (head_dim <= 192 or head_dim == 256)
        and head_dim % 8 == 0
        and not dropout
    )
    return next((name for name in KERNELS if fits and name in installed), "buckets")


def kernel_of(
    model: Any, device: torch.device, dtype: torch.dtype, *, sinks: bool = False
) -> Kernel:
    """Return the kernel for the segments of a model, by its Hugging Face configuration."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "buckets"
    chunks = "chunked_attention" in (getattr(model, "layer_types", None) or ())
    others = ("attn_logit_softcapping", "v_head_dim")  # explicit scores; values of another size
    if sinks or chunks or any(getattr(model, name, None) for name in others):
        return "buckets"
    return choose_kernel(
        torch.cuda.get_device_capability(device),
        dtype,
        head_dim=getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads,
        dropout=getattr(model, "attention_dropout", 0.0),
        installed=installed(),
    )


def installed() -> list[Kernel]:
    """Return the installed kernels."""
    found: list[Kernel] = []
    if torch.backends.cuda.is_flash_attention_available():
        from torch.nn.attention.varlen import varlen_attn

        if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys():
            found.append("varlen_attn")
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except ImportError:  # it is not there, or is of another PyTorch
        return found
    return [*found, "flash_attn"]


def varlen_attention(
    kernel: Kernel,
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads dim"],
    cu_seqlens: Int[Tensor, "_"],
    longest: int,
    rule: Rule,
) -> Float[Tensor, "tokens heads dim"]:
    """Return the attention of each token to what the rule's window shows of its sequence.

    Sequences are laid end to end; `cu_seqlens` are the first token of each, and the end.

    Raises: ValueError for a rule that no kernel has.
    """
    fits = not (rule.explicit or rule.chunk or rule.dropout)
    require(fits, "attention's rule", f"must suit {kernel}", rule, "report it: buckets take it")
    rows = (query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    window = (-1 if rule.window is None else rule.window - 1, 0)  # tokens before and after
    options: dict[str, Any] = {"window_size": window}
    if kernel == "varlen_attn":
        from torch.nn.attention.varlen import varlen_attn

        grouped = query.shape[1] != key.shape[1]
        options |= {"scale": rule.scaling, "enable_gqa": grouped}
        return varlen_attn(*rows, **options)  # type: ignore[return-value]
    from flash_attn import flash_attn_varlen_func

    # PyTorch's asks for this setting by itself.
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return flash_attn_varlen_func(*rows, softmax_scale=rule.scaling, causal=True, **options)


ATTENTION_NAME = "nemorl_segments"


@dataclass(frozen=True)
class SegmentBuckets:
    """The segments of packed rows, in buckets of similar length.

    tokens: of each bucket the flat token indices, `[segments, longest]`. A shorter segment repeats
    its last token; the copies are never read.
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
    longest: tokens of the longest segment.
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
    # A row of one segment, padded on the right, is causal; kernels for all lengths skip padding.
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
        offsets = torch.arange(int(lengths[inside].max()), device=lengths.device)
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
        require(
            not rule.dropout,
            "attention's dropout",
            "must be 0 on a GPU",
            rule.dropout,
            "set the model's attention_dropout to 0 before it is loaded",
        )
        # Autocast does not know these kernels; values come from a linear layer, which it knows,
        # where rotary angles leave queries and keys in float32.
        flat = [x.to(value.dtype) for x in flat]
        if segments.tokens is not None:
            flat = [x.index_select(0, segments.tokens) for x in flat]
        rows: Any = (*flat, segments.cu_seqlens, segments.longest, rule)
        output = varlen_attention(segments.kernel, *rows).flatten(1)
    else:
        flat, found = [x.contiguous() for x in flat], []
        for tokens in segments.tokens:
            qkv = (
                x.flatten(1)
                .index_select(0, tokens.flatten())
                .view(*tokens.shape, *x.shape[1:])
                .transpose(1, 2)
                for x in flat
            )
            found.append(attend(*qkv, rule=rule, causal=True).reshape(tokens.numel(), -1))
        output = torch.cat(found)
    if segments.places is not None:
        output = pad(output, (0, 0, 0, 1)).index_select(0, segments.places)
    batch, heads, seq, _ = query.shape
    return output.view(batch, seq, heads, value.shape[3])


CONTEXT_ATTENTION = "nemorl_context_parallel"


@dataclass(frozen=True)
class RowSplit:
    """How the tokens of rows of one width lie on the ranks of a group. `order[i]` is the place in
    the row of the i-th token of all ranks, laid end to end; `back` is its inverse.
    """

    order: Int[Tensor, "seq"]
    back: Int[Tensor, "seq"]
    rank: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, seq: int, rank: int, group: dist.ProcessGroup, device: torch.device) -> "RowSplit":
        """Raise ValueError unless `seq` is a multiple of twice the number of ranks."""
        order = zigzag(seq, dist.get_world_size(group)).to(device)
        return cls(order, order.argsort(), rank, group)

    @property
    def own(self) -> Int[Tensor, "part"]:
        return self.order.chunk(dist.get_world_size(self.group))[self.rank]

    def take(self, values: Shaped[Tensor, "batch seq *rest"]) -> Shaped[Tensor, "batch part *rest"]:
        return values.index_select(1, self.own)


def zigzag(seq: int, ranks: int) -> Int[Tensor, "seq"]:
    """Return the places of a row's tokens in the order in which the ranks hold them.

    >>> zigzag(8, 2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if seq % (2 * ranks):
        raise ValueError(
            f"rows that {ranks} ranks split must be a multiple of {2 * ranks} tokens wide, but they"
            f" have {seq}: pad them"
        )
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat([half for r in range(ranks) for half in (chunks[r], chunks[-1 - r])])


@dataclass(frozen=True)
class ContextState:
    """What attention needs to know of whole rows; made once per microbatch for all layers."""

    split: RowSplit
    segments: Segments | None = None
    bias: Float[Tensor, "batch 1 part seq"] | None = None
    """allgather: 0 for the keys that each of this rank's tokens sees, else -inf, keys in the order
    of the ranks; in the queries' dtype, so that no layer casts it.
    """
    positions: Int[Tensor, "batch seq"] | None = None
    """allgather: positions of the keys in their segments."""

    @property
    def width(self) -> int:
        return len(self.split.order)

    @classmethod
    def with_bias(
        cls,
        segment_ids: Int[Tensor, "batch seq"],
        position_ids: Int[Tensor, "batch seq"],
        split: RowSplit,
        dtype: torch.dtype,
    ) -> "ContextState":
        """Make it from whole rows: a token sees its segment up to itself, padding only itself."""
        segments, positions = segment_ids[:, None, split.order], position_ids[:, None, split.order]
        own, places = split.take(segment_ids)[:, :, None], split.take(position_ids)[:, :, None]
        sees = (own == segments) & (own > 0) & (places >= positions)
        sees |= (split.own[:, None] == split.order)[None]
        zero = torch.zeros((), dtype=dtype, device=sees.device)
        bias = zero.where(sees, -torch.inf)[:, None]
        return cls(split, bias=bias, positions=position_ids[:, split.order])


def context_attention(
    query: Float[Tensor, "batch heads part dim"],
    key: Float[Tensor, "batch kv_heads part dim"],
    value: Float[Tensor, "batch kv_heads part value_dim"],
    mask: None = None,
    *,
    rule: Rule = PLAIN,
    context: ContextState,
) -> Float[Tensor, "batch part heads value_dim"]:
    """Return the attention of this rank's tokens.

    ulysses (DeepSpeed): by all-to-all each rank has all tokens of some heads; keys are repeated
    where their heads don't divide. allgather (Llama 3): each rank collects all keys and values.
    """
    split = context.split
    if context.bias is not None:
        assert context.positions is not None
        bias, positions = context.bias, context.positions
        if rule.hides(context.width):
            own = positions.chunk(dist.get_world_size(split.group), 1)[split.rank]
            sees = rule.visible(own[:, :, None], positions[:, None])[:, None]
            bias = bias.masked_fill(~sees, -torch.inf)
        both = all_gather(torch.cat((key, value), -1), 2, split.group)
        key, value = both.split((key.shape[-1], value.shape[-1]), -1)
        return attend(query, key, value, bias, rule=rule)
    if key.shape[1] % dist.get_world_size(split.group):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    whole = [exchange(x, split.group).index_select(2, split.back) for x in (query, key, value)]
    if rule.sinks is not None:
        ranks = dist.get_world_size(split.group)
        rule = replace(rule, sinks=rule.sinks.chunk(ranks)[split.rank])
    output = segment_attention(*whole, rule=rule, segments=context.segments)
    return exchange(output.index_select(1, split.order), split.group)

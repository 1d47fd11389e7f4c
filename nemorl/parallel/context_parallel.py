"""Context parallelism: each row is split between the ranks of a group; attention joins its parts.

A row is cut into 2n chunks, of which rank r has the r-th from the front and from the back
(zig-zag), so that all have equal work under a causal mask. Segments of packed rows may lie across
chunks.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nemorl.models.attention import PLAIN, Rule, attend
from nemorl.parallel.attention import Segments, segment_attention
from nemorl.parallel.collectives import all_gather, exchange

CONTEXT_ATTENTION = "nemorl_context_parallel"


@dataclass(frozen=True)
class RowSplit:
    """How the tokens of rows of one width lie on the ranks of a group.

    `order[i]` is the place in the row of the i-th token of all ranks' laid end to end; `back` is
    its inverse.
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
    of the ranks. In the queries' dtype, or each layer would make and keep one of its own.
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

    ulysses (DeepSpeed): all-to-all, after which each rank has all tokens of some heads; keys are
    repeated where their heads don't divide. allgather (Llama 3): each rank collects all keys and
    values for its own queries.
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
    whole = [
        exchange(x, split=1, join=2, group=split.group).index_select(2, split.back)
        for x in (query, key, value)
    ]
    if rule.sinks is not None:
        ranks = dist.get_world_size(split.group)
        rule = replace(rule, sinks=rule.sinks.chunk(ranks)[split.rank])
    output = segment_attention(*whole, rule=rule, segments=context.segments)
    return exchange(output.index_select(1, split.order), split=1, join=2, group=split.group)

"""The few collective operations that gradients flow through."""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By their new names where torch has them (2.13)."""


class _AllGather(torch.autograd.Function):
    """Forward all-gather along a dim; backward reduce-scatter of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        first = values.movedim(dim, 0).contiguous()
        gathered = first.new_empty(dist.get_world_size(group) * first.shape[0], *first.shape[1:])
        ALL_GATHER(gathered, first, group=group)
        return gathered.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first = grads[0].movedim(ctx.dim, 0).contiguous()
        own = first.new_empty(first.shape[0] // dist.get_world_size(ctx.group), *first.shape[1:])
        REDUCE_SCATTER(own, first, op=dist.ReduceOp.SUM, group=ctx.group)
        return own.movedim(0, ctx.dim), None, None


class _AllGatherSame(torch.autograd.Function):
    """Forward all-gather along a dim; backward this rank's part alone, where all ranks go on to the
    same loss.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _AllGather.forward(ctx, values, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            grads[0]
            .chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
            .contiguous(),
            None,
            None,
        )


class _Exchange(torch.autograd.Function):
    """All-to-all: split along one dim, concatenate along another; backward the other way round."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, split: int, join: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        parts = torch.stack(values.chunk(dist.get_world_size(group), split)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            _Exchange.apply(grads[0].contiguous(), ctx.join, ctx.split, ctx.group),
            None,
            None,
            None,
        )


class _SumBackward(torch.autograd.Function):
    """Forward nothing; backward the sum over the group, of which each rank has a part of the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def all_gather(
    values: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """Every rank's values, joined along `dim` in the order of ranks; the gradient is the sum of
    what the ranks do with them.
    """
    return _AllGather.apply(values, dim, group)


def all_gather_same(
    values: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """The same for ranks that all compute the same loss from the result: each takes its own part of
    the gradient, which is counted once.
    """
    return _AllGatherSame.apply(values, dim, group)


def exchange(
    values: Float[Tensor, "..."], *, split: int, join: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """Rank r gets the r-th part along `split` of everybody's values, joined along `join` in the
    order of ranks.
    """
    return _Exchange.apply(values, split, join, group)


def sum_backward(values: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """The values themselves, whose gradient is summed over the group."""
    return _SumBackward.apply(values, group)

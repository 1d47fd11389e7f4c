"""The few collective operations that gradients flow through."""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

# By their new names where torch has them (2.13).
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGather(torch.autograd.Function):
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
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return _AllGather.forward(ctx, values, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = grads[0].chunk(dist.get_world_size(ctx.group), ctx.dim)
        return parts[dist.get_rank(ctx.group)].contiguous(), None, None


class _Exchange(torch.autograd.Function):
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
        back = _Exchange.apply(grads[0].contiguous(), ctx.join, ctx.split, ctx.group)
        return back, None, None, None


class _SumBackward(torch.autograd.Function):
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
    values: Shaped[Tensor, "..."], dim: int, group: dist.ProcessGroup
) -> Shaped[Tensor, "..."]:
    """Join every rank's values along `dim`; the gradient is the sum of all ranks' gradients."""
    return _AllGather.apply(values, dim, group)


def all_gather_same(
    values: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """Join every rank's values along `dim`, for ranks that all compute the same loss of the result:
    each takes its own part of the gradient.
    """
    return _AllGatherSame.apply(values, dim, group)


def exchange(
    values: Float[Tensor, "..."], *, split: int, join: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """Give rank r the r-th part along `split` of all ranks' values, joined along `join`."""
    return _Exchange.apply(values, split, join, group)


def sum_backward(values: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """Return the values themselves; their gradient is summed over the group."""
    return _SumBackward.apply(values, group)

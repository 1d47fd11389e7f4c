"""This process's place among the ranks that train a model together, and how they meet."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, reduce
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.rendezvous import rendezvous

from nemorl.accelerator import is_accelerator
from nemorl.models.causal_lm import usable_device
from nemorl.parallel.plan import ParallelPlan

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SLOWEST_SAVE = timedelta(days=1)
"""A rank may wait this long for others that write; a dead one is noticed at once."""


class RanksLost(RuntimeError):
    """An error after which ranks are of no more use, though each may answer."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of a process along the axes of the mesh, and its groups (None if it is alone).

    It has the rows of `data_rank`; of each row it holds the tokens of `cp_rank`.
    """

    plan: ParallelPlan
    device: torch.device
    dims: Any = None
    """torchtitan's ParallelDims; None in a process that trains alone, on plain tensors."""
    rank: int = 0
    size: int = 1
    data_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    data_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    """The ranks with other tokens of the same rows."""
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    """All ranks, for Python objects and CPU tensors."""
    saving_group: dist.ProcessGroup | None = None
    """All ranks, for a checkpoint that is written beside training steps."""

    @cached_property
    def sharded(self) -> bool:
        """Whether parameters are DTensors; with a single rank, too, if it was started as one."""
        return self.dims is not None

    def stage(self, part: int) -> int:
        """Return the number of a pipeline stage, of which this rank has `plan.vpp`."""
        return part * self.plan.pp + self.pp_rank

    @cached_property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.plan.pp - 1

    @property
    def fsdp_mesh(self) -> Any:
        """The mesh over which FSDP2 shards; with dp_replicate the first axis repeats (HSDP)."""
        axes = ["dp_replicate", "fsdp"] if self.plan.dp_replicate > 1 else "fsdp"
        return self.dims.get_mesh(axes)

    def merge_objects(
        self,
        value: T,
        merge: Callable[[T, T], T],
        *,
        group: dist.ProcessGroup | None = None,
        everywhere: bool = True,
    ) -> T:
        """Return the values of all ranks, merged in their order; a collective call.

        everywhere: else only rank 0 has the result.

        Raises: what `merge` raises, where the result would be.
        """
        if self.control_group is None:
            return value
        group = group or self.control_group
        if everywhere:
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, value, group=group)
            return reduce(merge, found)
        to: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, to, group=group, group_dst=0)
        return reduce(merge, to) if to else value

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the last stages' values over all rows, on all ranks."""
        if self.data_group is not None:
            dist.all_reduce(values, group=self.data_group)
        if self.pp_group is not None:
            dist.broadcast(values, group=self.pp_group, group_src=self.plan.pp - 1)
        return values

    @contextmanager
    def share_errors(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Raise one rank's error in the block on every rank, as RuntimeError unless it is an
        OSError or a ValueError; a collective call. The block must make none.
        """
        own, cause = None, None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            cause, host = error, socket.gethostname()
            kind: type[Exception] = RuntimeError
            reason = repr(error)
            if isinstance(error, OSError | ValueError):
                kind = type(error) if isinstance(error, OSError) else ValueError
                reason = str(error)
            own = kind, f"rank {self.rank} of {self.size} on {host}: {reason}"
        if found := self.merge_objects(own, lambda first, other: first or other, group=group):
            kind, message = found
            raise kind(message) from cause


def start_process_group(
    device_name: str | None, *, timeout: timedelta | None = None
) -> torch.device:
    """Initialize torch.distributed from the environment; return this rank's device."""
    kind = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if is_accelerator(kind) and kind.index is None:
        # Where each process sees only its own GPU, that is number 0.
        alone = torch.get_device_module(kind).device_count() == 1
        kind = torch.device(kind.type, 0 if alone else int(os.environ.get("LOCAL_RANK", 0)))
    device = usable_device(str(kind))
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)
    if not dist.is_initialized():
        theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
        here = os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost") and not theirs
        store, rank, size = next(_meet() if here else rendezvous("env://"))
        # When torchrun restarts the ranks, its store still has the addresses of the old ones.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"restart_{restarts}", store)
        backend = "gloo"
        if is_accelerator(device):
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def _meet() -> Iterator[tuple[dist.Store, int, int]]:
    """Meet at this machine's loopback."""
    names = psutil.net_if_addrs().items()
    here = next(name for name, own in names if any(one.address == LOOPBACK for one in own))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", here)
    rank, size, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listening = None if rank else socket.create_server((LOOPBACK, port)).detach()
    yield dist.TCPStore(LOOPBACK, port, size, rank == 0, master_listen_fd=listening), rank, size


def is_started_as_rank() -> bool:
    """Return whether this process was started as a rank, by torchrun or by us.

    A process group of one says nothing: vLLM leaves one behind.
    """
    return ("WORLD_SIZE" in os.environ and "RANK" in os.environ) or (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )


# By their new names where torch has them (2.13).
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup, same: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.same = dim, group, same
        first = values.movedim(dim, 0).contiguous()
        gathered = first.new_empty(dist.get_world_size(group) * first.shape[0], *first.shape[1:])
        ALL_GATHER(gathered, first, group=group)
        return gathered.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        size = dist.get_world_size(ctx.group)
        if ctx.same:
            own = grads[0].chunk(size, ctx.dim)[dist.get_rank(ctx.group)].contiguous()
            return own, None, None, None
        first = grads[0].movedim(ctx.dim, 0).contiguous()
        own = first.new_empty(first.shape[0] // size, *first.shape[1:])
        REDUCE_SCATTER(own, first, op=dist.ReduceOp.SUM, group=ctx.group)
        return own.movedim(0, ctx.dim), None, None, None


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
    return _AllGather.apply(values, dim, group, False)


def all_gather_same(
    values: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup
) -> Float[Tensor, "..."]:
    """Join every rank's values along `dim`, for ranks that all compute the same loss; the gradient
    is each one's own part.
    """
    return _AllGather.apply(values, dim, group, True)


def exchange(values: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """Give rank r the r-th part of dimension 1 of all ranks' values, joined along dimension 2."""
    parts = torch.stack(values.chunk(dist.get_world_size(group), 1))
    return torch.cat(all_to_all_single_autograd(parts, None, None, group).unbind(), 2)


def sum_backward(values: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """Return the values themselves; their gradient is summed over the group."""
    return _SumBackward.apply(values, group)

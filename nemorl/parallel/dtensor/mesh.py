"""Which part of the work is this process's: its ranks along the axes of the mesh, and the groups
that it talks to.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from nemorl.models.causal_lm import usable_device
from nemorl.parallel.plan import ParallelPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class World:
    """One process of those that train a model together.

    A rank's rows are those of `data_rank`; of each row it holds the tokens of `cp_rank`.
    """

    plan: ParallelPlan
    device: torch.device
    dims: Any = None
    """torchtitan's ParallelDims; None in a process that trains alone on plain tensors."""
    rank: int = 0
    size: int = 1
    data_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    data_group: dist.ProcessGroup | None = None
    """Those with other rows; None where there is nobody else, as of the groups below."""
    cp_group: dist.ProcessGroup | None = None
    """Those with the other tokens of the same rows."""
    tp_group: dist.ProcessGroup | None = None
    """Those with the other parts of each layer."""
    control_group: dist.ProcessGroup | None = None
    """All ranks, for Python objects and CPU tensors."""

    @property
    def sharded(self) -> bool:
        """Whether parameters are DTensors; also with a single rank, if it was started as one."""
        return self.dims is not None

    @property
    def data_size(self) -> int:
        return self.plan.data_ranks

    @property
    def fsdp_mesh(self) -> Any:
        """Over which FSDP2 shards; with dp_replicate the first axis repeats (HSDP)."""
        return self.dims.get_mesh(
            ["dp_replicate", "fsdp"] if self.plan.dp_replicate > 1 else "fsdp"
        )

    @property
    def tp_mesh(self) -> Any:
        """None without tensor parallelism."""
        return self.dims.get_mesh("tp") if self.plan.tp > 1 else None

    @classmethod
    def alone(cls, device: torch.device, plan: ParallelPlan) -> World:
        """A process that trains by itself, on plain tensors."""
        return cls(plan=plan, device=device)

    @classmethod
    def of(
        cls, plan: ParallelPlan, device_name: str | None, *, timeout_s: float | None = None
    ) -> World:
        """This process's place among those that were started together (RANK, WORLD_SIZE, … in the
        environment); a collective call.

        A collective may take `timeout_s` (torch's default unless given). Raises ValueError where
        the plan asks for another number of ranks.
        """
        from nemorl.parallel.dtensor.titan import make_dims

        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        device = start_process_group(device_name, timeout=timeout)
        if (
            timeout is not None
        ):  # those of the mesh's axes take torch's default, and there is no other way to say it
            distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
        plan = plan.on(dist.get_world_size())
        dims = make_dims(plan, device.type)
        groups = {name: dims.get_optional_mesh(name) for name in ("batch", "cp", "tp")}
        ranks = {
            name: 0 if mesh is None else mesh.get_local_rank() for name, mesh in groups.items()
        }
        found = {name: None if mesh is None else mesh.get_group() for name, mesh in groups.items()}
        fake = dist.get_backend() == "fake"  # a plan that is only tried, in one process
        return cls(
            plan=plan,
            device=device,
            dims=dims,
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            data_rank=ranks["batch"],
            cp_rank=ranks["cp"],
            tp_rank=ranks["tp"],
            data_group=found["batch"],
            cp_group=found["cp"],
            tp_group=found["tp"],
            control_group=None if fake else dist.new_group(backend="gloo"),
        )

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank has, in the order of ranks; a collective call."""
        if self.control_group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control_group)
        return found


def start_process_group(
    device_name: str | None, *, timeout: timedelta | None = None
) -> torch.device:
    """This rank's device, with torch.distributed initialised, as whoever started the ranks says in
    the environment.
    """
    kind = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type == "cuda":
        alone = torch.cuda.device_count() == 1  # as where each process is shown its own GPU alone
        kind = torch.device(
            "cuda",
            kind.index
            if kind.index is not None
            else 0
            if alone
            else int(os.environ.get("LOCAL_RANK", 0)),
        )
    device = usable_device(str(kind))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, size = next(iter(rendezvous("env://")))
        # torchrun keeps its store when it starts the processes again, and in it the addresses of
        # those that are gone.
        store = dist.PrefixStore(
            f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
        )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def is_started_as_rank() -> bool:
    """Whether this process is one of several, or was started as one, by torchrun or a launcher of
    ours.

    A process group of one by itself says nothing: vLLM leaves one behind in the process that it ran
    in.
    """
    return ("WORLD_SIZE" in os.environ and "RANK" in os.environ) or (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )

"""The place of this process among ranks that torchtitan has arranged in a mesh."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from nemorl.accelerator import is_accelerator
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import SLOWEST_SAVE, World, start_process_group


def join(plan: ParallelPlan, device_name: str | None, *, timeout_s: float | None = None) -> World:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, …); a collective call.

    A process that joins them again gets the first groups: each has threads, and torch's caches hold
    on to a mesh.
    """

    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    device = start_process_group(device_name, timeout=timeout)
    plan = plan.on(dist.get_world_size()).with_precision(accelerator=is_accelerator(device))
    key = plan, device, timeout, dist.group.WORLD
    if key in _JOINED:
        return _JOINED[key]
    dims = make_dims(plan, device.type)
    if timeout is not None:
        for mesh in dims.get_all_one_dimensional_meshes().values():
            mesh.get_group().set_timeout(timeout)
    place: dict[str, Any] = {}
    for name, axis in (("data", "batch"), ("cp", "cp"), ("tp", "tp")):
        mesh = dims.get_optional_mesh(axis)
        place[f"{name}_rank"] = 0 if mesh is None else mesh.get_local_rank()
        place[f"{name}_group"] = None if mesh is None else mesh.get_group()
    if dist.get_backend() != "fake":  # which tries a plan in one process
        place["control_group"] = dist.new_group(backend="gloo", timeout=timeout)
        place["saving_group"] = dist.new_group(backend="gloo", timeout=SLOWEST_SAVE)
    _JOINED[key] = World(
        plan=plan,
        device=device,
        dims=dims,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        **place,
    )
    return _JOINED[key]


_JOINED: dict[Any, World] = {}


try:
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.tools import utils
except ImportError as error:
    raise ValueError(
        f"parallel with several ranks needs torchtitan, which can't be imported ({error}): pip"
        " install 'nemorl[titan]'"
    ) from error

# It advises on meshes that torchtitan makes.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def make_dims(plan: ParallelPlan, device_type: str) -> ParallelDims:
    """Build the device mesh of a plan whose degrees are all known; a collective call.

    Its axes are dp_replicate, fsdp (dp_shard · cp), cp and tp.
    """
    assert plan.dp_shard is not None, "resolve the plan with ParallelPlan.on"
    # torchtitan guesses it when it is imported: a GPU, even where the run asks for CPUs.
    parallel_dims.device_type = utils.device_type = device_type
    dims = ParallelDims(
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        cp=plan.cp,
        tp=plan.tp,
        pp=1,
        ep=1,
        world_size=plan.num_ranks,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


def checkpoint_activations(decoder: nn.Module, how: str) -> None:
    """Recompute each layer in the backward pass, all of it (full) or the cheap part (selective)."""
    # The operator is then there by whose name selective checkpointing keeps what attention returns.
    import torch.nn.attention.varlen  # noqa: F401

    policy: Any = {"full": FullAC, "selective": SelectiveAC}[how]
    policy.Config().build().apply(decoder)

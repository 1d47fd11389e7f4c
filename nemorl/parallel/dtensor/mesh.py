"""The place of this process among ranks that torchtitan has arranged in a mesh."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nemorl.accelerator import is_accelerator
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import SLOWEST_SAVE, World, start_process_group


def join(plan: ParallelPlan, device_name: str | None, *, timeout_s: float | None = None) -> World:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, …); a collective call.

    A process that joins again gets its first groups: each has threads, and torch caches meshes.
    """
    from nemorl.parallel.dtensor.titan import make_dims

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
        if (mesh := dims.get_optional_mesh(axis)) is not None:
            place |= {f"{name}_rank": mesh.get_local_rank(), f"{name}_group": mesh.get_group()}
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

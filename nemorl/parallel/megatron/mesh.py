"""The place of this process among ranks that megatron-core has divided into groups."""

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemorl.accelerator import is_accelerator
from nemorl.parallel.megatron.core import parallel_state, random
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import SLOWEST_SAVE, World, start_process_group

DEFAULT_TIMEOUT_S = 1800.0


def join(plan: ParallelPlan, device_name: str | None, *, timeout_s: float | None = None) -> World:
    """Join the ranks that the environment names; a collective call.

    megatron-core has one division of the ranks for the whole process: one with other degrees
    replaces it, and models of the former are of no more use.
    """
    timeout_s = timeout_s or DEFAULT_TIMEOUT_S
    device = start_process_group(device_name, timeout=timedelta(seconds=timeout_s))
    plan = plan.on(dist.get_world_size()).with_precision(accelerator=is_accelerator(device))
    key = plan.tp, plan.pp, plan.cp, plan.ep, device, timeout_s, dist.group.WORLD
    if key not in _JOINED:
        _leave()
        parallel_state.initialize_model_parallel(
            plan.tp,
            plan.pp,
            context_parallel_size=plan.cp,
            expert_model_parallel_size=plan.ep,
            expert_tensor_parallel_size=1 if plan.ep > 1 else plan.tp,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
        # Models without dropout draw no numbers that ranks would have to tell apart.
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        _JOINED[key] = _place(device, timedelta(seconds=timeout_s))
    return World(plan=plan, **_JOINED[key])


_JOINED: dict[Any, dict[str, Any]] = {}


def _leave() -> None:
    while _JOINED:
        (*_, world), place = _JOINED.popitem()
        # Of a process group that has ended, all are gone.
        if world is dist.group.WORLD:
            dist.barrier()  # or another rank might still use what this one closes
            groups = parallel_state._global_process_group_list or []
            for group in (*groups, place["control_group"], place["saving_group"]):
                if group is not None:  # that one stands for all ranks
                    dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _place(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    groups = {
        "data": parallel_state.get_data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }
    place: dict[str, Any] = {f"{name}_rank": group.rank() for name, group in groups.items()}
    for name, group in groups.items():
        place[f"{name}_group"] = group if group.size() > 1 else None
    return place | {
        "device": device,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "control_group": dist.new_group(backend="gloo", timeout=timeout),
        "saving_group": dist.new_group(backend="gloo", timeout=SLOWEST_SAVE),
    }

"""All that we take from megatron-core, which nothing else imports; and another device where it asks
for CUDA. On CUDA nothing is changed.
"""

# ruff: noqa: F401

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from nemorl.accelerator import is_accelerator
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import SLOWEST_SAVE, World, start_process_group

# Advice to install Transformer Engine and Apex, and what newer PyTorch deprecates.
warnings.filterwarnings("ignore", module=r"(nemorl\.parallel\.)?megatron\.")
for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
    warnings.filterwarnings("ignore", rf".*{name}. is deprecated", FutureWarning)

try:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
except ImportError as error:
    raise ValueError(
        f"trainer.backend megatron needs megatron-core, which can't be imported ({error}): pip"
        " install 'nemorl[megatron]'"
    ) from error

# megatron-core 0.16.1 asks for the name, and lacks it without Transformer Engine.
vars(moe_utils).setdefault("te_general_gemm", None)
# It logs the settings of every model.
logging.getLogger("megatron.core").setLevel(logging.WARNING)


class _CudaIs(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        if kwargs and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **(kwargs or {}))


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _splits(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def runtime(device: torch.device) -> Iterator[None]:
    """Run megatron-core on this device in the block; models have no dropout."""
    with ExitStack() as stack:
        if device.type != "cuda":
            for place, name, function in (
                (torch.cuda, "current_device", lambda: device),
                (torch.cuda, "synchronize", lambda *_: None),
                (torch.cuda, "Stream", _Stream),
                (torch.cuda, "current_stream", _Stream),
                (torch.cuda, "stream", lambda _: nullcontext()),
                (token_dispatcher, "maybe_move_tensor_to_cpu", _splits),
                (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
                (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            ):
                stack.enter_context(patch.object(place, name, function))
            stack.enter_context(_CudaIs(device))
        yield


def join(plan: ParallelPlan, device_name: str | None, *, timeout_s: float | None = None) -> World:
    """Join the ranks that the environment names; a collective call.

    megatron-core has one division of the ranks per process: other degrees replace it, and end the
    models of the former.
    """
    timeout_s = timeout_s or 1800.0
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
        # Without dropout ranks need no random numbers of their own.
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        _JOINED[key] = _place(device, timedelta(seconds=timeout_s))
    return World(plan=plan, **_JOINED[key])


_JOINED: dict[Any, dict[str, Any]] = {}


def _leave() -> None:
    while _JOINED:
        (*_, world), place = _JOINED.popitem()
        # The groups of a process group that has ended are gone.
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
    place: dict[str, Any] = {}
    for name, group in groups.items():
        place[f"{name}_rank"] = group.rank()
        place[f"{name}_group"] = group if group.size() > 1 else None
    return place | {
        "device": device,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "control_group": dist.new_group(backend="gloo", timeout=timeout),
        "saving_group": dist.new_group(backend="gloo", timeout=SLOWEST_SAVE),
    }

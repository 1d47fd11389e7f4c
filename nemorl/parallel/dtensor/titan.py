"""All that we take from torchtitan, and what makes it run without a GPU. Nothing else imports it."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nemorl.checks import require
from nemorl.parallel.plan import ParallelPlan

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: (
        "cpu"
    )  # torchtitan asks once, when it is imported, and takes no answer for cuda
try:
    import torch.testing._internal.distributed.fake_pg  # the backend of mesh axes of one rank, which torch registers here only
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    from torchtitan.distributed.tensor_parallel import NoParallel
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.tools import utils
except ImportError as error:
    raise ValueError(
        f"parallel with several ranks needs torchtitan, which can't be imported ({error}): pip"
        " install 'nemorl[titan]'"
    ) from error

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
    logging.ERROR
)  # advice on meshes that are torchtitan's

__all__ = [
    "NoParallel",
    "ParallelDims",
    "checkpoint_activations",
    "clip_gradients",
    "make_dims",
    "peak_flops",
    "sum_gradients",
]


def make_dims(plan: ParallelPlan, device_type: str) -> ParallelDims:
    """The device mesh of a plan whose degrees are all known, with the axes dp_replicate, fsdp
    (dp_shard · cp), cp and tp; a collective call.
    """
    require(
        plan.dp_shard is not None,
        "parallel.dp_shard",
        "must be known here",
        plan.dp_shard,
        "resolve the plan with ParallelPlan.on",
    )
    assert plan.dp_shard is not None
    parallel_dims.device_type = utils.device_type = (
        device_type  # what the run asks for, on a machine with GPUs, too
    )
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


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients instead of averaging them: the loss's weights know the whole step
    (docs/numerics.md, Weighted sums). A plain sum, as gloo has no other.
    """
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def checkpoint_activations(decoder: nn.Module, how: str) -> None:
    """Have each layer recompute in the backward pass: all of it ("full"), or what is cheap ("selective")."""
    policy: Any = {"full": FullAC, "selective": SelectiveAC}[how]
    policy.Config().build().apply(decoder)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients so that their norm over the whole mesh is at most `max_norm`.

    Returns the norm before.
    """
    return clip_grad_norm_(parameters, max_norm, foreach=True)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name; None where torchtitan's table does not have it
    (it would answer as for an A100).
    """
    known = (
        "A100",
        "H100",
        "H200",
        "H20",
        "B200",
        "B300",
        "MI355X",
        "MI300X",
        "MI325X",
        "MI250X",
        "L40S",
        "A6000",
    )
    name = device_name.replace("L40S", "l40s")  # as the table spells it
    return float(utils.get_peak_flops(name)) if any(one in device_name for one in known) else None

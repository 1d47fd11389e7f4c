"""All that we take from torchtitan; nothing else imports it."""

import logging
from collections.abc import Iterable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

# Importing it also registers the backend "fake", which mesh axes of one rank have.
from torch.distributed.fsdp import FSDPModule

from nemorl.parallel.plan import ParallelPlan

try:
    from torchtitan.distributed import ParallelDims, parallel_dims
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

# It advises on meshes that torchtitan makes.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

__all__ = [
    "NoParallel",
    "checkpoint_activations",
    "clip_gradients",
    "make_dims",
    "peak_flops",
    "sum_gradients",
]


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


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients, not average them: the loss's weights are those of the whole step.

    By a plain sum, the only one that gloo has.
    """
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def checkpoint_activations(decoder: nn.Module, how: str) -> None:
    """Recompute each layer in the backward pass: all of it ("full"), or the cheap part
    ("selective").
    """
    policy: Any = {"full": FullAC, "selective": SelectiveAC}[how]
    policy.Config().build().apply(decoder)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients to a norm over the whole mesh of at most `max_norm`; return the norm
    before.
    """
    return clip_grad_norm_(parameters, max_norm, foreach=True)


KNOWN_GPUS = (
    *("A100", "H100", "H200", "H20", "B200", "B300", "L40S", "A6000"),
    *("MI355X", "MI300X", "MI325X", "MI250X"),
)
"""GPUs in torchtitan's table, which answers as for an A100 for all others."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by its name, or None if it is not known."""
    if not any(one in device_name for one in KNOWN_GPUS):
        return None
    return float(utils.get_peak_flops(device_name.replace("L40S", "l40s")))

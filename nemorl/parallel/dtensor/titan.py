"""All that we take from torchtitan; nothing else imports it."""

import logging
from typing import Any

from torch import nn

from nemorl.parallel.plan import ParallelPlan

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
    """Build the device mesh (dp_replicate, fsdp = dp_shard · cp, cp, tp) of a plan whose degrees
    are all known; a collective call.
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
    # Selective checkpointing keeps the results of this module's operator by its name.
    import torch.nn.attention.varlen  # noqa: F401

    policy: Any = {"full": FullAC, "selective": SelectiveAC}[how]
    policy.Config().build().apply(decoder)

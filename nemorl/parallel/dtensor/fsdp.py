"""FSDP2 and HSDP: parameters, gradients and optimizer state are sharded; a layer's parameters are
gathered while it computes.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from nemorl.models.causal_lm import decoder_of, head_of, layers_of
from nemorl.parallel.dtensor.tensor_parallel import is_tied
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import DTYPES


def apply_fsdp(model: Any, mesh: Any, plan: ParallelPlan) -> None:
    """Shard a model's parameters over a mesh, in place; over one rank, too, for mixed precision.

    Units are layers, the embedding, and the last norm with the head, where tied all three.

    mesh: the axis fsdp, or dp_replicate and fsdp (HSDP).
    """
    decoder, head = decoder_of(model), head_of(model)
    dtypes = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision], reduce_dtype=DTYPES[plan.reduce_dtype]
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": dtypes}
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    norms = (getattr(decoder, name, None) for name in ("norm", "norm_f"))
    ends = [model.get_input_embeddings(), *filter(None, norms), head]
    if not is_tied(model):
        fully_shard(ends.pop(0), **options, reshard_after_forward=True)
    fully_shard(ends, **options, reshard_after_forward=False)
    for layer in layers_of(decoder):
        fully_shard(layer, **options, reshard_after_forward=True)
    fully_shard(model, **options)
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients, not average them: a loss's weights count over the whole step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, all that gloo has

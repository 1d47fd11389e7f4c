"""FSDP2 (and HSDP): parameters, gradients and optimizer state are sharded, and a layer's are
gathered while it computes.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from nemorl.parallel.dtensor.mesh import DTYPES, World
from nemorl.parallel.dtensor.tensor_parallel import is_tied
from nemorl.parallel.dtensor.titan import sum_gradients


def apply_fsdp(model: Any, world: World) -> None:
    """Shard the model's parameters over the world's mesh, in place; also where that is one rank,
    for the sake of mixed precision.

    A unit for each layer, one for the embedding, and one for the last norm and the head (a single
    one where they are tied). Gradients are summed.
    """
    plan, decoder, head = world.plan, model.get_decoder(), model.get_output_embeddings()
    options: dict[str, Any] = {
        "mesh": world.fsdp_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[plan.param_dtype], reduce_dtype=DTYPES[plan.reduce_dtype]
        ),
    }
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if is_tied(model):
        fully_shard(
            [decoder.embed_tokens, decoder.norm, head], **options, reshard_after_forward=False
        )
    else:
        fully_shard(decoder.embed_tokens, **options, reshard_after_forward=True)
        fully_shard([decoder.norm, head], **options, reshard_after_forward=False)
    for layer in decoder.layers:
        fully_shard(layer, **options, reshard_after_forward=True)
    fully_shard(model, **options)
    sum_gradients(model)


def reshard(model: nn.Module) -> None:
    """Give back what is gathered: without a backward pass the head stays so, and its parameters are
    copies in what the model computes in.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

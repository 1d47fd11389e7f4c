"""A Hugging Face model spread over the ranks of a mesh, in the order that works: meta build, tensor
parallelism, head, checkpointing, compile, FSDP2, memory, weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nemorl.models.adapters import live_tensors
from nemorl.models.attention import use_attention
from nemorl.models.causal_lm import (
    SCORE,
    check_files,
    decoder_of,
    fresh_head,
    head_of,
    layers_of,
    warn_of_unused,
)
from nemorl.models.hub import loading, weight_files
from nemorl.models.tensor_files import TensorFiles, shapes_of, stored_names
from nemorl.parallel.accumulation import outline_of
from nemorl.parallel.attention import (
    ATTENTION_NAME,
    CONTEXT_ATTENTION,
    context_attention,
    segment_attention,
)
from nemorl.parallel.config import BackendConfig, LoRAConfig
from nemorl.parallel.dtensor.lora import add_adapters, fresh_adapters
from nemorl.parallel.dtensor.pieces import fill
from nemorl.parallel.dtensor.tensor_parallel import is_tied
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.tokens import install_head
from nemorl.parallel.world import DTYPES, World


def build(
    config: BackendConfig, world: World, *, given: nn.Module | None = None, frozen: bool = False
) -> nn.Module:
    """Build this rank's shards of the model that the configuration names; a collective call.

    Fresh weights, a given model and an adapter folder are first whole on each rank's CPU.

    frozen: without gradients and adapters.
    """
    lora = LoRAConfig() if frozen else config.lora
    model, whole, folder = outline_of(config, given)
    world.plan.check(model.config)
    if lora.rank:
        add_adapters(model, lora, base=config.model.path, seed=config.seed)
    if frozen:
        model.requires_grad_(False)
    shard(model, world)
    materialize(model, world)
    if whole is not None:
        copy_whole(model, whole.state_dict())
    else:
        assert folder is not None
        unused = load_folder(model, folder, seed=config.seed)
        is_reference = frozen and config.trains
        if world.rank == 0 and not is_reference:
            warn_of_unused(unused)
    if lora.rank:
        copy_whole(model, fresh_adapters(model, seed=config.seed))
    return model


def shard(model: Any, world: World) -> None:
    """Spread a model over the mesh, in place; on the meta device this takes no memory."""
    from nemorl.parallel.dtensor.tensor_parallel import apply_tensor_parallel
    from nemorl.parallel.dtensor.titan import checkpoint_activations

    plan, decoder = world.plan, decoder_of(model)
    if plan.cp > 1:
        use_attention(model, CONTEXT_ATTENTION, context_attention)
    else:
        use_attention(model, ATTENTION_NAME, segment_attention)
    if plan.tp > 1:
        tp_mesh = world.dims.get_mesh("tp")
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
        apply_tensor_parallel(model, tp_mesh, sequence_parallel=plan.sequence_parallel)
        for name in frozen:  # torch makes new parameters of norms, which would train
            model.get_parameter(name).requires_grad_(False)
    install_head(model, world.tp_group, sequence_parallel=plan.sequence_parallel)
    if plan.recomputes != "none":
        checkpoint_activations(decoder, plan.recomputes)
    if plan.compile:
        # Layers are alike: one is compiled, and all use it. With DTensors it is compiled again for
        # each shape (torch 2.13); after eight shapes layers run uncompiled.
        for layer in decoder.layers:
            layer.compile(dynamic=False if plan.tp > 1 else None)
    apply_fsdp(model, world.fsdp_mesh, plan)


def materialize(model: Any, world: World) -> None:
    """Allocate this rank's shards; compute buffers that no file holds, as rotary frequencies."""
    model.to_empty(device="cpu" if world.plan.cpu_offload else world.device)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers leaves it as it is
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = module._buffers[name].to(world.device)
        if module._non_persistent_buffers_set:
            model._init_weights(module)


def load_folder(model: Any, folder: Path, *, seed: int) -> set[str]:
    """Read this rank's piece of every parameter from a folder of safetensors, or make a scalar head
    from `seed`; return the names that the model does not use.

    Raises: ValueError for parameters that are missing or of other shapes.
    """
    wanted = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in live_tensors(model).items()
        if ".lora_" not in name
    }
    with loading(str(folder)):
        stored = TensorFiles(weight_files(folder))
        if set(SCORE) <= wanted.keys() - stored.shapes.keys():
            copy_whole(model, fresh_head(model.config, seed=seed))
            wanted = {name: tensor for name, tensor in wanted.items() if name not in SCORE}
        names = stored_names(model)
        names = {name: names[name] for name in names.keys() - stored.shapes.keys()}
        unused = check_files(model, stored.shapes, shapes_of(wanted, names))
        for name, tensor in wanted.items():
            fill(tensor, stored, name, names)
    return unused


@torch.no_grad()
def copy_whole(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy each parameter's shard out of the whole tensors that every rank has, by name."""
    for name, parameter in live_tensors(model).items():
        if (value := whole.get(name.replace(".base_layer.", "."))) is None:
            continue
        value = value.detach().to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(value)


def apply_fsdp(model: Any, mesh: Any, plan: ParallelPlan) -> None:
    """Shard a model's parameters over a mesh, in place; over one rank, too, for mixed precision.

    Units are layers, the embedding, and the last norm with the head, where tied all three.
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
    # Gradients are summed, not averaged: a loss's weights count over the whole step.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, all that gloo has

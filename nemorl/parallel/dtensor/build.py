"""A Hugging Face model spread over the ranks of a mesh, in the order that works: meta build, tensor
parallelism, head, checkpointing, compile, FSDP2, memory, weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nemorl.checks import require
from nemorl.models.adapters import adapted_layers
from nemorl.models.attention import use_attention
from nemorl.models.causal_lm import load_causal_lm, on_meta
from nemorl.models.hub import loading
from nemorl.models.pretrained import weight_files, weights_folder
from nemorl.models.tensor_files import TensorFiles
from nemorl.parallel.config import BackendConfig, LoRAConfig
from nemorl.parallel.dtensor.attention import ATTENTION_NAME, segment_attention
from nemorl.parallel.dtensor.context_parallel import CONTEXT_ATTENTION, context_attention
from nemorl.parallel.dtensor.head import install_head
from nemorl.parallel.dtensor.lora import NAME, add_adapters, fresh_adapters
from nemorl.parallel.dtensor.mesh import World
from nemorl.parallel.dtensor.pieces import fill, full_tensor


def canonical(name: str) -> str:
    """Return a parameter's Hugging Face name, without what checkpointing and compilation add.

    >>> canonical("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def without_adapter(name: str) -> str:
    """Return the plain model's name of a weight, which may have an adapter beside it."""
    return canonical(name).replace(".base_layer.", ".")


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by its Hugging Face name, tied ones once."""
    return {canonical(name): parameter for name, parameter in model.named_parameters()}


def build(
    config: BackendConfig, world: World, *, given: nn.Module | None = None, frozen: bool = False
) -> nn.Module:
    """Build this rank's shards of the model that the configuration names; a collective call.

    Weights are read from safetensors straight into the shards. Only fresh weights, a given model
    and an adapter folder are first loaded whole on each rank's CPU.

    frozen: without gradients and adapters.

    Raises: ValueError where the model can't be loaded, is not supported, or does not suit the plan.
    """
    lora, path = LoRAConfig() if frozen else config.lora, config.model.path
    remedy = "spread the model with parallel.dp_shard or parallel.cp instead"
    fits = not lora.rank or world.plan.tp == 1
    require(fits, "lora.rank", "must be 0 with parallel.tp above 1", lora.rank, remedy)
    whole = given is not None or config.model.from_scratch
    folder = None if whole else weights_folder(path)
    if folder is None and given is None:
        given = load_causal_lm(path, from_scratch=config.model.from_scratch, seed=config.seed)
    model = on_meta(str(folder) if given is None else given.config)
    world.plan.check(model.config)
    if lora.rank:
        add_adapters(model, lora, base=path, seed=config.seed)
    if frozen:
        model.requires_grad_(False)
    shard(model, world)
    materialize(model, world)
    if given is not None:
        copy_whole(model, given.state_dict())
    else:
        assert folder is not None
        load_folder(model, folder)
    if lora.rank:
        fresh = fresh_adapters(model, seed=config.seed)
        copy_whole(model, {canonical(name): tensor for name, tensor in fresh.items()})
    return model


def shard(model: Any, world: World) -> None:
    """Spread a model over the mesh, in place; it needs no memory for that (meta device)."""
    from nemorl.parallel.dtensor.fsdp import apply_fsdp
    from nemorl.parallel.dtensor.tensor_parallel import apply_tensor_parallel
    from nemorl.parallel.dtensor.titan import checkpoint_activations

    plan, decoder = world.plan, model.get_decoder()
    if plan.cp > 1:
        use_attention(model, CONTEXT_ATTENTION, context_attention)
    else:
        use_attention(model, ATTENTION_NAME, segment_attention)
    if plan.tp > 1:
        tp_mesh = world.dims.get_mesh("tp")
        apply_tensor_parallel(model, tp_mesh, sequence_parallel=plan.sequence_parallel)
    install_head(model, world.tp_group, sequence_parallel=plan.sequence_parallel)
    if plan.activation_checkpointing != "none":
        checkpoint_activations(decoder, plan.activation_checkpointing)
    if plan.compile:
        compile_layers(decoder, dynamic=False if plan.tp > 1 else None)
    apply_fsdp(model, world.fsdp_mesh, plan)


def compile_layers(decoder: Any, *, dynamic: bool | None) -> None:
    """Compile each layer in place. They are alike: one is compiled, and all use it. Attention is
    not compiled.

    dynamic: False to compile anew for each shape of a microbatch, as DTensors need it (torch 2.13);
    after eight shapes layers run uncompiled.
    """
    for layer in decoder.layers:
        layer.compile(dynamic=dynamic)


def materialize(model: Any, world: World) -> None:
    """Allocate this rank's shards, and compute the rotary embeddings, which no file holds."""
    model.to_empty(device="cpu" if world.plan.cpu_offload else world.device)
    rotary = model.get_decoder().rotary_emb
    for name, buffer in type(rotary)(config=model.config).named_buffers():
        setattr(rotary, name, buffer.to(world.device))


def load_folder(model: nn.Module, folder: Path) -> None:
    """Read this rank's piece of every parameter from a folder of safetensors.

    Raises: ValueError where some are missing or of other shapes.
    """
    wanted = {
        without_adapter(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    with loading(str(folder)), TensorFiles(weight_files(folder)) as stored:
        wrong = []
        for name, tensor in wanted.items():
            found, expected = stored.shapes.get(name), list(tensor.shape)
            if found is None:
                wrong.append(f"{name} is missing")
            elif list(found) != expected:
                wrong.append(f"{name} is {list(found)}, where {expected} is expected")
        if wrong:
            raise ValueError(f"{'; '.join(wrong[:3])} ({len(wrong)} in all)")
        for name, tensor in wanted.items():
            fill(tensor, stored, name)


def copy_whole(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy each parameter's shard out of whole tensors, which every rank has; names that `whole`
    lacks stay as they are.
    """
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            value = whole.get(without_adapter(name), whole.get(name))
            if value is None:
                continue
            value = value.detach().to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(
                    value, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(value)


def export(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter whole, under its Hugging Face name; a collective call.

    One at a time, tied ones once, adapters merged. No rank holds more than one whole parameter.

    dtype: cast to it before they are gathered.
    """
    layers = {canonical(name): layer for name, layer in adapted_layers(model)}
    for name, parameter in parameters_by_name(model).items():
        if ".lora_" in name:
            continue
        layer, value = layers.get(name.partition(".base_layer.")[0]), parameter.detach()
        value = full_tensor(value if dtype is None or layer is not None else value.to(dtype))
        if layer is not None and name.endswith(".base_layer.weight"):
            a, b = (
                full_tensor(part[NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B)
            )
            value = value + layer.scaling[NAME] * (b @ a)
        yield without_adapter(name), value if dtype is None else value.to(dtype)

"""A Hugging Face model spread over the ranks of a mesh, in the order that works: meta build, tensor
parallelism, head, checkpointing, compile, FSDP2, memory, weights.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nemorl.checks import require
from nemorl.models.adapters import CONFIG, adapted_layers
from nemorl.models.causal_lm import check_supported, load_causal_lm
from nemorl.models.tensor_files import INDEX, TensorFiles
from nemorl.parallel.config import BackendConfig, LoRAConfig
from nemorl.parallel.dtensor.attention import ATTENTION_NAME, register_attention
from nemorl.parallel.dtensor.context_parallel import CONTEXT_ATTENTION, register_context_attention
from nemorl.parallel.dtensor.head import install_head
from nemorl.parallel.dtensor.lora import NAME, add_adapters
from nemorl.parallel.dtensor.mesh import World
from nemorl.parallel.dtensor.pieces import fill, full_tensor

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What checkpointing and compilation add to the names of parameters."""


def canonical(name: str) -> str:
    """A parameter's Hugging Face name, whatever wraps its module.

    >>> canonical("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by its Hugging Face name, tied ones once."""
    return {canonical(name): parameter for name, parameter in model.named_parameters()}


def build(
    config: BackendConfig, world: World, *, given: nn.Module | None = None, frozen: bool = False
) -> nn.Module:
    """The model that the configuration names, as this rank's shards on its device; a collective
    call. `frozen`: without gradients and adapters.

    Weights are read from safetensors straight into the shards. Only a model with fresh weights, one
    that was given, and one that is an adapter folder are made whole on each rank's CPU first.

    Raises ValueError where the model can't be loaded, is not supported, or does not suit the plan.
    """
    lora = LoRAConfig() if frozen else config.lora
    require(not lora.rank or world.plan.tp == 1, "lora.rank", "must be 0 with parallel.tp above 1", lora.rank,
            "spread the model with parallel.dp_shard or parallel.cp instead")  # fmt: skip
    folder = (
        None
        if given is not None or config.model.from_scratch
        else weights_folder(config.model.path)
    )
    if folder is None and given is None:
        given = load_causal_lm(
            config.model.path, from_scratch=config.model.from_scratch, seed=config.seed
        )
    model = on_meta(given.config if given is not None else str(folder))
    world.plan.check(model.config)
    if lora.rank:
        add_adapters(model, lora, base=config.model.path, seed=config.seed)
    if frozen:
        model.requires_grad_(False)
    shard(model, world)
    materialize(model, world)
    with torch.no_grad():
        if given is not None:
            copy_whole(model, given.state_dict())
        else:
            assert folder is not None
            load_folder(model, folder)
        if lora.rank:
            copy_whole(model, fresh_adapters(model, seed=config.seed))
    return model


def on_meta(source: Any) -> Any:
    """The model of a configuration, or of a folder's or hub name's, in float32 without memory.

    Raises ValueError where it is not supported.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source) if isinstance(source, str) else source
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path must be a folder with a Hugging Face model or a hub name, but {source!r}"
            f" has no configuration ({reason}): check it"
        ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_supported(model)
    return model


def shard(model: Any, world: World) -> None:
    """Spread a model over the world's mesh, in place; it needs no memory for that (meta device)."""
    from nemorl.parallel.dtensor.fsdp import apply_fsdp
    from nemorl.parallel.dtensor.tensor_parallel import apply_tensor_parallel
    from nemorl.parallel.dtensor.titan import checkpoint_activations

    plan = world.plan
    register_attention()
    register_context_attention()
    model.set_attn_implementation(CONTEXT_ATTENTION if plan.cp > 1 else ATTENTION_NAME)
    if plan.tp > 1:
        apply_tensor_parallel(model, world.tp_mesh, sequence_parallel=plan.sequence_parallel)
    install_head(model, world)
    if plan.activation_checkpointing != "none":
        checkpoint_activations(model.get_decoder(), plan.activation_checkpointing)
    if plan.compile:
        compile_layers(model.get_decoder(), dynamic=False if plan.tp > 1 else None)
    apply_fsdp(model, world)


def compile_layers(decoder: Any, *, dynamic: bool | None) -> None:
    """Compile each layer in place: they are alike, so that one is compiled and all use it.
    Attention stays as it is, a break between two graphs.

    `dynamic=False`: anew for each shape of a microbatch, as DTensors want it (torch 2.13); after
    eight of them layers go on uncompiled.
    """
    for layer in decoder.layers:
        layer.compile(dynamic=dynamic)


def materialize(model: Any, world: World) -> None:
    """Memory for this rank's shards, with nothing in it yet, and rotary embeddings computed anew,
    which no file holds.
    """
    model.to_empty(device="cpu" if world.plan.cpu_offload else world.device)
    rotary = model.get_decoder().rotary_emb
    fresh = type(rotary)(config=model.config)
    for name, buffer in fresh.named_buffers():
        setattr(rotary, name, buffer.to(world.device))


def weights_folder(name: str) -> Path | None:
    """The folder with the safetensors of a model, fetched from the hub if need be; None for an
    adapter folder or weights in another form.
    """
    if not name:
        raise ValueError(
            "model.path must name a model folder or a hub model, but it is empty: give --model.path"
            " PATH"
        )
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(
                    name, allow_patterns=["model*.safetensors", "*.json"], ignore_patterns=["*/*"]
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.path must be a folder with a Hugging Face model or a hub name, but {name!r}"
                f" could not be loaded ({reason}): check it"
            ) from error
    return None if (folder / CONFIG).is_file() or not weight_files(folder) else folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model's folder that `transformers` takes: model.safetensors, else those
    that the index names; others may be stale.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"model.path must be a whole model, but {folder / INDEX} can't be read ({error!r}):"
            " fetch the model anew"
        ) from error
    return [folder / name for name in sorted(names)]


def load_folder(model: nn.Module, folder: Path) -> None:
    """Read this rank's piece of every parameter from a folder of safetensors.

    Raises ValueError where some are missing or of other shapes.
    """
    wanted = {
        without_adapter(name): parameter.detach()
        for name, parameter in parameters_by_name(model).items()
        if ".lora_" not in name
    }
    try:
        with TensorFiles(weight_files(folder)) as stored:
            shapes = stored.shapes
            wrong = [f"{name} is missing" for name in wanted if name not in shapes]
            wrong += [
                f"{name} is {list(shapes[name])}, where {list(tensor.shape)} is expected"
                for name, tensor in wanted.items()
                if name in shapes and tuple(shapes[name]) != tuple(tensor.shape)
            ]
            if wrong:
                raise ValueError(f"{'; '.join(wrong[:3])} ({len(wrong)} in all)")
            for name, tensor in wanted.items():
                fill(tensor, stored, name)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"model.path must hold all weights of its model, but {str(folder)!r} could not be"
            f" loaded ({error}): check it"
        ) from error


def without_adapter(name: str) -> str:
    """The plain model's name of a weight beside which there may be an adapter."""
    return name.replace(".base_layer.", ".")


def copy_whole(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy each parameter's shard out of whole tensors, which every rank has; of names that `whole`
    lacks nothing is changed.
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


def fresh_adapters(model: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """The numbers that PEFT gives new adapters in one process with this seed, drawn in its order;
    on a meta model it draws none.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model):
        rank, width = layer.lora_A[NAME].weight.shape
        first, second = (
            nn.Linear(width, rank, bias=False),
            nn.Linear(rank, layer.lora_B[NAME].weight.shape[0], bias=False),
        )
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
        nn.init.zeros_(second.weight)
        found |= {
            canonical(f"{name}.lora_A.{NAME}.weight"): first.weight,
            canonical(f"{name}.lora_B.{NAME}.weight"): second.weight,
        }
    torch.set_rng_state(generator_state)
    return found


def export(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, under its Hugging Face name, one at a time; tied ones once, adapters
    merged. A collective call.

    Cast to `dtype` before it is gathered. No rank ever holds more than one whole parameter.
    """
    layers = {canonical(name): layer for name, layer in adapted_layers(model)}
    for name, parameter in parameters_by_name(model).items():
        if ".lora_" in name:
            continue
        layer = layers.get(name.partition(".base_layer.")[0])
        value = full_tensor(
            parameter.detach()
            if dtype is None or layer is not None
            else parameter.detach().to(dtype)
        )
        if layer is not None and name.endswith(".base_layer.weight"):
            a, b = (
                full_tensor(part[NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B)
            )
            value = value + layer.scaling[NAME] * (b @ a)
        yield without_adapter(name), value if dtype is None else value.to(dtype)

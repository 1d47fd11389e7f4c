"""PEFT adapters in a model: which layers have them, and how they are merged into the weights."""

import json
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from nemorl.models.hub import CONFIG, DAMAGED_PICKLE, base_of


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers but the output layer and routers, by name."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not type(layer).__module__.startswith("transformers")
        if layer is not head
    }


def quantize_layers(model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Replace each linear layer but the output layer by one in 4 bits, in place, one by one."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for name, layer in linear_layers(model).items():
        sizes = (layer.in_features, layer.out_features)
        found = Linear4bit(*sizes, bias=False, compute_dtype=dtype, device="meta", **how)
        found.weight = Params4bit(layer.weight.detach(), requires_grad=False, **how).to(device)
        found.bias = layer.bias
        found.forward = types.MethodType(_multiplied, found)
        model.set_submodule(name, found)


def _multiplied(layer: Any, x: Tensor) -> Tensor:
    """Without gradients, bitsandbytes would take other kernels, which round otherwise."""
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import dequantize_4bit

    rows, state = x.to(layer.compute_dtype), layer.weight.quant_state
    if torch.is_grad_enabled() and rows.requires_grad:
        found = matmul_4bit(rows, layer.weight, quant_state=state)
    else:
        found = linear(rows, dequantize_4bit(layer.weight.data, state).to(rows.dtype))
    return (found if layer.bias is None else found + layer.bias.to(found.dtype)).to(x.dtype)


def is_quantized(tensor: Tensor) -> bool:
    return getattr(tensor, "quant_state", None) is not None


@torch.no_grad()
def dequantized(weight: Any, packed: Tensor) -> Tensor:
    """Return the matrix that a quantized weight stands for, in float32."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, weight.quant_state).float()


def dequantize_layers(model: nn.Module) -> None:
    """Replace each layer in 4 bits by a plain one that computes the same, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and is_quantized(layer.weight):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            weight = dequantized(layer.weight, layer.weight.data)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)


PREFIX = "base_model.model."
"""What PEFT's names of adapters' matrices begin with."""
Adapters = Literal["merged", "apart", "alone"]
WEIGHTS = "adapter_model.safetensors"
"""PEFT's name of the file in an adapter folder, beside CONFIG."""


def require_peft(what: str) -> None:
    # PEFT imports it, and it warns of a faster kernel whether or not a weight is in 4 bits.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package peft, which can't be imported ({error}): pip install"
            " 'nemorl[lora]'"
        ) from error


def canonical(name: str) -> str:
    """Return a module's or parameter's name without what activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {canonical(name): layer for name, layer in modules if hasattr(layer, "base_layer")}


def has_adapters(model: nn.Module) -> bool:
    return bool(adapted_layers(model))


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, of tied ones the first."""
    seen: dict[int, str] = {}
    return {
        canonical(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(tensor), name) == name and ".weight." not in name
    }


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that ranks may share; then a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def itself(tensor: Tensor) -> Tensor:
    return tensor


@torch.no_grad()
def merged_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    present: Callable[[Tensor], Tensor] = itself,
    adapters: Adapters = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the model has once adapters are merged, under Hugging Face's names.

    An adapted weight is a new tensor, W + alpha/rank · B A, as is one in 4 bits; all others are the
    live ones. Those of a sharded model are gathered one by one: a collective call.

    present: returns a tensor to read, where a live one may be offloaded.
    adapters: apart or alone: A and alpha/rank · B under PEFT's names, last or nothing else.
    """
    layers = adapted_layers(model)
    for name, tensor in live_tensors(model).items() if adapters != "alone" else ():
        if ".lora_" in name:
            continue
        owner, adapted, leaf = name.partition(".base_layer.")
        merges = adapted and leaf == "weight" and adapters == "merged"
        value = present(tensor.detach())
        if is_quantized(tensor):
            value = dequantized(tensor, value)
        value = full_tensor(value if merges else value.to(dtype=dtype))
        if merges:
            layer = layers[owner]
            for adapter in layer.active_adapters:
                a, b = (
                    full_tensor(present(part[adapter].weight.detach()))
                    for part in (layer.lora_A, layer.lora_B)
                )
                value = value + layer.scaling[adapter] * (b @ a)
        yield f"{owner}.{leaf}" if adapted else name, value.to(dtype=dtype)
    for owner, layer in layers.items() if adapters != "merged" else ():
        for adapter in layer.active_adapters:
            for part, scale in (("lora_A", 1.0), ("lora_B", layer.scaling[adapter])):
                value = full_tensor(present(getattr(layer, part)[adapter].weight.detach())) * scale
                yield f"{PREFIX}{owner}.{part}.weight", value.to(dtype=dtype)


def write_adapters(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write matrices that `merged_tensors` yielded, of any ranks, as a PEFT folder."""
    from safetensors.torch import save_file

    rank = max(each.shape[0] for name, each in tensors.items() if ".lora_A." in name)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in tensors}),
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(values), encoding="utf-8")
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)


def merge_adapters(model: nn.Module) -> nn.Module:
    dequantize_layers(model)
    for name, layer in adapted_layers(model).items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False  # type: ignore[assignment]  # of transformers
    return model


def merge_folder(model: nn.Module, folder: Path) -> nn.Module:
    require_peft(f"the adapter folder {folder}")
    from peft import PeftModel

    must = f"{folder} must hold adapters to {base_of(folder)}"
    try:
        with warnings.catch_warnings():
            # PEFT would leave what a file lacks as it is initialized: without an effect.
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except UnpicklingError as error:  # whose text advises to run it
        raise ValueError(f"{must}, but {DAMAGED_PICKLE}: ask its author for {WEIGHTS}") from error
    except Exception as error:  # PEFT refuses broken files with any
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ValueError(
            f"{must}, but they don't fit ({reason}): name the base model of its run"
        ) from error

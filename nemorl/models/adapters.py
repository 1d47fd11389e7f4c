"""A model with PEFT adapters in it: which layers have them, and how they get into the weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT calls the parts of an adapter folder."""


def require_peft(what: str) -> None:
    """Raise a ValueError that says how to install PEFT where it is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package peft, which can't be imported ({error}): pip install"
            " 'nemorl[lora]'"
        ) from error


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by their name in the model."""
    yield from (
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")
    )


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer has one."""
    return next(adapted_layers(model), None) is not None


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers that a model has once its adapters are merged, under
    the plain model's names; tied ones once.

    An adapted weight is W + alpha/rank · B A, made when its turn comes; all others are the live
    tensors. The model itself stays as it is.
    """
    layers, seen = dict(adapted_layers(model)), set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer, adapted, leaf = name.partition(".base_layer.")
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = tensor.detach()
        if adapted and leaf == "weight":
            with torch.no_grad():
                value = value + sum(
                    layers[layer].get_delta_weight(adapter)
                    for adapter in layers[layer].active_adapters
                )
        yield f"{layer}.{leaf}" if adapted else name, value


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights and take them out, in place: the model is a plain one again
    and gives the answers that it gave with them.
    """
    for name, layer in list(adapted_layers(model)):
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False  # type: ignore[assignment]  # transformers' own note that there are some
    return model


def base_of(folder: Path) -> str | None:
    """The base model that an adapter folder names.

    Raises ValueError where its adapter_config.json is not what PEFT writes.
    """
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{folder / CONFIG} must be a JSON object as PEFT writes it, but can't be read as one"
            f" ({error}): write it anew"
        ) from error


def merge_folder(model: nn.Module, folder: Path) -> nn.Module:
    """Merge the adapters in a PEFT folder into their base model, in place.

    Raises ValueError where they are not adapters to this model.
    """
    require_peft(f"the adapter folder {folder}")
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{folder} must hold adapters to {base_of(folder)}, but they don't fit ({reason}): name"
            " the base model of its run"
        ) from error

"""PEFT adapters in a model: which layers have them, and how they are merged into the weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of the files in an adapter folder."""


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
    """Yield the layers that have an adapter, with their names."""
    yield from (item for item in model.named_modules() if hasattr(item[1], "base_layer"))


def has_adapters(model: nn.Module) -> bool:
    return next(adapted_layers(model), None) is not None


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers that the model has once adapters are merged.

    Names are those of the plain model, tied tensors come once. An adapted weight is a new tensor,
    W + alpha/rank · B A; all others are the live ones. The model is not changed.
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
    """Merge the adapters into the weights in place: the model is a plain one with equal outputs."""
    for name, layer in list(adapted_layers(model)):
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False  # type: ignore[assignment]  # of transformers
    return model


def base_of(folder: Path) -> str | None:
    """Return the base model that an adapter folder names.

    Raises: ValueError where its adapter_config.json can't be read.
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
    """Merge the adapters of a PEFT folder into their base model, in place.

    Raises: ValueError where they are not adapters of this model.
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

"""LoRA through PEFT: adapters put into a model in place, switched off for the reference, written
and read as PEFT's own folders.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.checks import require
from nemorl.models.adapters import CONFIG, adapted_layers
from nemorl.parallel.config import LoRAConfig

NAME = "default"
"""PEFT's name of the only adapter that there is."""
SAMPLED = 1024
"""Numbers of each tensor that a fingerprint looks at."""


def add_adapters(
    model: nn.Module, config: LoRAConfig, *, base: str | None = None, seed: int = 0
) -> None:
    """Give the model's linear layers adapters, which are all that trains from now on. They begin
    with B = 0: the model's answers stay the same.

    `base` is the folder or hub name by which others find the model without them. Raises ValueError
    for `target_modules` that it doesn't have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    alpha: Any = (
        int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    )  # other readers of the file want an int where it is one
    options: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "task_type": "CAUSAL_LM",
    }
    torch.manual_seed(seed)
    inject_adapter_in_model(
        LoraConfig(target_modules=targets(model, config), base_model_name_or_path=base, **options),
        model,
        NAME,
    )


def targets(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The names given, each of which must be that of linear layers, whole or its last parts, but
    not of the output layer; else the names of all.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    ]
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    for name in config.target_modules:
        fits = any(layer == name or layer.endswith(f".{name}") for layer in layers)
        require(
            fits,
            "lora.target_modules",
            "must name linear layers other than the output layer",
            name,
            f"there are {', '.join(known)}",
        )
    return list(config.target_modules) or known


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it had any: its own reference, without a copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' live parameters, under the names that they have in PEFT's files."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)[NAME].weight
        for name, layer in adapted_layers(model)
        for part in ("lora_A", "lora_B")
    }


def peft_config(model: Any) -> Any:
    """PEFT's own configuration of the model's adapters."""
    return model.peft_config[NAME]


def write_adapter_config(model: nn.Module, folder: Path) -> None:
    """Write what `PeftModel.from_pretrained(base, folder)` needs besides the adapters' weights."""
    config = peft_config(model)
    values = {**config.to_dict(), "target_modules": sorted(config.target_modules)}
    (folder / CONFIG).write_text(
        json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def check_scale(model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the adapters in `folder` were scaled as the model's are."""
    alpha, now = (
        json.loads((folder / CONFIG).read_text(encoding="utf-8"))["lora_alpha"],
        peft_config(model).lora_alpha,
    )
    require(
        alpha == now,
        "lora.alpha",
        f"must be that of the checkpoint ({alpha:g})",
        now,
        "leave it as it was",
    )


def fingerprint(model: nn.Module) -> str:
    """Of the weights without adapters: a hash of their names, shapes and up to `SAMPLED` evenly
    spaced numbers of each.

    It tells another model, or the same one after training (which changes about every number),
    without reading gigabytes. A spread model has the same one, for which its tensors are gathered
    one by one: a collective call.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            flat = whole.detach().flatten()
            sample = (
                flat[:: flat.numel() // SAMPLED | 1].float().cpu()
            )  # odd, so that the steps don't fall into one column
            digest.update(
                f"{name.replace('.base_layer.', '.')} {tuple(tensor.shape)}".encode()
                + sample.numpy().tobytes()
            )
    return digest.hexdigest()


def check_base(expected: str, found: str, folder: Path) -> None:
    """Raise a ValueError if a model's fingerprint is not that of the one that the adapters in
    `folder` were trained beside.
    """
    if found != expected:
        raise ValueError(
            f"checkpoint {folder} must be of the model in use, but its adapters were trained beside"
            " other weights: load the base model of that run anew (one that was trained in this"
            " process has its adapters merged)"
        )


def check_initial(expected: str, found: str, folder: Path) -> None:
    """Raise a ValueError if a model's fingerprint is not that of the one that the run of the
    checkpoint in `folder` began with, its reference.
    """
    if found != expected:
        raise ValueError(
            f"checkpoint {folder} must be of a run that began with the model in use, because that"
            " is the reference, but it began with other weights: load the initial model of that"
            " run anew (one that was given to a run is trained afterwards)"
        )

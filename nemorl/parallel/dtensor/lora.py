"""LoRA through PEFT: adapters in a model, switched off for the reference, in PEFT's folders."""

import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.checks import require
from nemorl.models.adapters import PREFIX, adapted_layers, linear_layers, live_tensors
from nemorl.models.hub import CONFIG
from nemorl.parallel.accumulation import local_part, storage_of
from nemorl.parallel.config import FUSED, LoRAConfig, matching

NAME = "default"


def add_adapters(
    model: nn.Module, config: LoRAConfig, *, base: str | None = None, seed: int = 0
) -> None:
    """Add adapters, with B = 0, to the linear layers, and train nothing else from now on.

    Raises: ValueError for `target_modules` that the model does not have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    # Other readers of the file want an int where it is one.
    alpha: Any = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        lora_dropout=config.dropout,
        task_type="CAUSAL_LM",
        target_modules=_targets(model, config),
        base_model_name_or_path=base,
    )
    torch.manual_seed(seed)
    inject_adapter_in_model(settings, model, NAME)
    layers = adapted_layers(model)
    known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    for field, patterns in config.patterns().items():
        for key in patterns:
            require(
                any(matching({key: True}, name, False) for name in layers),
                f"lora.{field}",
                "must name layers that get an adapter",
                key,
                f"there are {known}",
            )


def _targets(model: nn.Module, config: LoRAConfig) -> list[str]:
    layers = linear_layers(model)
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    for name in config.target_modules:
        require(
            any(f".{layer}".endswith(f".{name}") for layer in layers),
            "lora.target_modules",
            "must name linear layers other than the output layer",
            name,
            f"there are {', '.join(known)}",
        )
    if any("experts" in name and tensor.ndim > 2 for name, tensor in model.named_parameters()):
        # PEFT would take these for parts of the experts' fused matrices.
        taken = {name for name in config.target_modules if name.rpartition(".")[2] in FUSED}
        require(
            not taken,
            "lora.target_modules",
            f"must not name {', '.join(FUSED)} in a mixture of experts",
            sorted(taken),
            "adapt the attention",
        )
        known = [name for name in known if name not in FUSED]
    return list(config.target_modules) or known


def fresh_adapters(model: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """Return the numbers that PEFT gives new adapters in one process with this seed; on the meta
    device it draws none.
    """
    found: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in adapted_layers(model).items():
            rank, width = layer.lora_A[NAME].weight.shape
            first = nn.Linear(width, rank, bias=False)
            second = nn.Linear(rank, layer.lora_B[NAME].weight.shape[0], bias=False)
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
            nn.init.zeros_(second.weight)
            found[f"{name}.lora_A.{NAME}.weight"] = first.weight
            found[f"{name}.lora_B.{NAME}.weight"] = second.weight
    return found


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Give the outputs of the model without adapters: its own reference, without a copy."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' live parameters under their names in PEFT's files."""
    return {
        f"{PREFIX}{name}.{part}.weight": getattr(layer, part)[NAME].weight
        for name, layer in adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write what `PeftModel.from_pretrained(base, folder)` needs besides the adapters' weights."""
    settings = model.peft_config[NAME].to_dict()
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted) + "\n"  # of sets
    (folder / CONFIG).write_text(text, encoding="utf-8")


def check_scale(model: Any, folder: Path) -> None:
    """Raise ValueError unless the adapters in `folder` were scaled as the model's are."""
    saved, settings = json.loads((folder / CONFIG).read_text("utf-8")), model.peft_config[NAME]
    for layer in adapted_layers(model):
        alpha = matching(saved.get("alpha_pattern") or {}, layer, saved["lora_alpha"])
        now = matching(settings.alpha_pattern, layer, settings.lora_alpha)
        name = "lora.alpha" if now == settings.lora_alpha else f"lora.alpha_pattern, for {layer},"
        require(
            alpha == now,
            name,
            f"must be the same as in the checkpoint ({alpha:g})",
            now,
            "leave it as it was",
        )


_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Backends of this process whose adapters are over weights that were loaded for them."""


@torch.no_grad()
def share_base(backend: Any) -> None:
    """Replace a new backend's frozen weights by another live one's, where all of this rank's parts
    are equal.
    """
    own = _frozen(backend)
    for other in _LIVE:
        theirs = _frozen(other)
        if own.keys() == theirs.keys() and all(_equal(own[name], theirs[name]) for name in own):
            for name, parameter in own.items():
                if hasattr(parameter, "_local_tensor"):  # FSDP2 looks there when it begins
                    parameter._local_tensor = theirs[name]._local_tensor
                else:
                    parameter.data = theirs[name].data
            break
    _LIVE.add(backend)


def leave_base(backend: Any) -> bool:
    """Remove a backend from the live ones; return whether others have its weights."""
    own = {storage_of(each) for each in _frozen(backend).values()}
    _LIVE.discard(backend)
    return not own.isdisjoint(others_weights(backend))


def others_weights(backend: Any) -> set[int]:
    """Return the storages' addresses of other live backends' frozen weights."""
    return {
        storage_of(each)
        for other in _LIVE
        if other is not backend
        for each in _frozen(other).values()
    }


def _frozen(backend: Any) -> dict[str, Any]:
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in live_tensors(backend._loaded()).items()
        if isinstance(tensor, nn.Parameter) and ".lora_" not in name
    }


def _equal(one: Any, other: Any) -> bool:
    a, b = local_part(one), local_part(other)
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    for name in ("placements", "device_mesh"):
        same &= getattr(one, name, None) == getattr(other, name, None)
    return same and torch.equal(a, b)

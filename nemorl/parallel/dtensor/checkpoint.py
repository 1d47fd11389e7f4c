"""A model and its optimizer as safetensors: exact, and loaded without running anything from the file."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save_model(model: nn.Module, path: Path) -> None:
    """Every parameter and persistent buffer, tied ones once."""
    save_file({name: tensor.detach().contiguous() for name, tensor in unique_tensors(model).items()}, path, metadata={"format": "pt"})


def load_model(model: nn.Module, path: Path) -> None:
    """Copy what `save_model` wrote into the model's own tensors. Raises ValueError, before anything is changed, if it is another model's."""
    saved, own = load_file(path), unique_tensors(model)
    wrong = sorted(name for name in saved.keys() | own.keys() if name not in saved or name not in own or saved[name].shape != own[name].shape)
    if wrong:
        raise ValueError(
            f"checkpoint {path} must be of the model in use, but differs in {', '.join(wrong[:5])} ({len(wrong)} in all): name the model of that run"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Named parameters and persistent buffers; of tensors that share memory only the first name."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The state tensors by parameter index. What the configuration says (learning rate, decay) is not state and is not saved."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    save_file({f"{index}.{name}": tensor.contiguous() for index, entries in state.items() for name, tensor in entries.items()}, path)


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Take over what `save_optimizer` wrote."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

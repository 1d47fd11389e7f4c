"""AdamW, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl.accelerator import is_accelerator, module_of
from nemorl.parallel.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then constant, or
    linear or cosine decay.

    The rate falls to `min_lr_ratio · lr` one step after the last one, so that every step trains.
    From the end of the warm-up on, this is what transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup` give. Their warm-up is one step behind: its first rate is 0.

    >>> config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, config, total_steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Make AdamW of parameters, with weight decay on those that are matrices.

    Parameters on different device meshes are in different groups: no operation takes both.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for of_mesh in by_mesh.values() or [[]]:
        matrices = [p for p in of_mesh if p.ndim >= 2]
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
        groups.append({"params": [p for p in of_mesh if p.ndim < 2], "weight_decay": 0.0})
    fused = config.implementation == "fused"
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )


def require_finite(loss: Float[Tensor, ""], grad_norm: Float[Tensor, ""], *, step: int) -> None:
    """Raise FloatingPointError unless both are finite, before a weight changes.

    step: of the optimizer, from 1.
    """
    if bool(loss.isfinite() & grad_norm.isfinite()):
        return
    name, value = ("gradient's norm", grad_norm) if bool(loss.isfinite()) else ("loss", loss)
    raise FloatingPointError(
        f"the {name} of optimizer step {step} must be finite, but it is {float(value)}: the weights"
        " were left as they are; look for extreme advantages or logprobs in the samples, or lower"
        " optimizer.lr"
    )


class Offloaded:
    """Moves the memory of tensors to main memory, pinned where they are a GPU's, and back.

    The tensors stay the same objects, as do views of them, but nothing may compute with them until
    `restore`.
    """

    def __init__(self) -> None:
        self._away: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(copy) for _, copy in self._away.values())

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._away

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors, of which several may share memory; what is away already stays there."""
        taken = {}
        for storage in (local_part(tensor).untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage._cdata not in taken:
                pinned = is_accelerator(storage.device)
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                taken[storage._cdata] = storage, copy.copy_(_bytes(storage), non_blocking=True)
        self._away |= taken
        devices = {storage.device for storage, _ in self._away.values()}
        modules = [module_of(device) for device in devices if is_accelerator(device)]
        for module in modules:
            module.synchronize()
        for storage, _ in taken.values():
            storage.resize_(0)
        for module in modules:
            module.empty_cache()

    def restore(self) -> None:
        """Move everything back, bit for bit. May be repeated after an error for lack of memory."""
        for storage, copy in self._away.values():
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        self._away.clear()

    def present(self, tensor: Tensor) -> Tensor:
        """Return a new tensor on the device, equal to one that is away; any other as it is."""
        local = local_part(tensor)
        found = self._away.get(storage_of(local))
        if found is None:
            return tensor
        # The storage may be a buffer of many parameters: only this one's part is copied.
        whole = found[1].view(local.dtype)
        part = whole.as_strided(local.shape, local.stride(), local.storage_offset())
        part = part.to(local.device, copy=True)
        if not isinstance(tensor, DTensor):
            return part
        return DTensor.from_local(
            part,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage of what this rank holds of a tensor."""
    return local_part(tensor).untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""AdamW, the learning rate as a pure function of the step, and clipping by the global norm."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nemorl.parallel.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """The learning rate of step `step`, from 0: linear warm-up, then constant, linear or cosine
    down to `min_lr_ratio · lr` at the last step.

    >>> config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, config, total_steps=5) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(
        1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    )
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, with weight decay on matrices only: what is one in the
    whole model, however it is cut into shards.

    Parameters on different device meshes are in different groups, because one operation can't take
    both.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    meshes = list(dict.fromkeys(getattr(p, "device_mesh", None) for p in parameters)) or [None]
    groups: list[dict[str, Any]] = []
    for mesh in meshes:
        of_mesh = [p for p in parameters if getattr(p, "device_mesh", None) == mesh]
        groups += [
            {"params": [p for p in of_mesh if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in of_mesh if p.ndim < 2], "weight_decay": 0.0},
        ]
    fused = config.implementation == "fused"
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Float[Tensor, ""]:
    """Scale all gradients so that their global norm is at most `max_norm` (None: leave them).

    Returns the norm before.
    """
    return nn.utils.clip_grad_norm_(list(parameters), math.inf if max_norm is None else max_norm)


def require_finite(loss: Float[Tensor, ""], grad_norm: Float[Tensor, ""], *, step: int) -> None:
    """Raise FloatingPointError unless both are finite, so that no weight is spoilt; `step` is that
    of the optimizer, from 1.

    >>> require_finite(torch.tensor(float("nan")), torch.tensor(1.0), step=3)
    Traceback (most recent call last):
    FloatingPointError: the loss of optimizer step 3 must be finite, but it is nan: ...
    """
    if bool(loss.isfinite() & grad_norm.isfinite()):
        return
    name, value = ("loss", loss) if not bool(loss.isfinite()) else ("gradient's norm", grad_norm)
    raise FloatingPointError(
        f"the {name} of optimizer step {step} must be finite, but it is {float(value)}: the weights"
        " were left as they are; look for extreme advantages or logprobs in the samples, check the"
        " model's weights, or lower optimizer.lr"
    )

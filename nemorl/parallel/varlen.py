"""Causal attention over sequences of any lengths in one call, by kernels of FlashAttention."""

import os
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.checks import require
from nemorl.models.attention import Rule
from nemorl.overlapping import Overlapping

Kernel = Literal["varlen_attn", "flash_attn", "buckets"]
KERNELS: tuple[Kernel, ...] = ("varlen_attn", "flash_attn")


def choose_kernel(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    *,
    head_dim: int,
    dropout: float,
    installed: Collection[Kernel],
) -> Kernel:
    """Return the kernel for segments: PyTorch's, that of the package flash-attn, or, where neither
    can be used, dense attention over buckets of similar lengths.
    """
    fits = (
        capability is not None
        and capability >= (8, 0)
        and dtype in (torch.bfloat16, torch.float16)
        # Between 192 and 256 the gradient has no kernel on some GPUs.
        and (head_dim <= 192 or head_dim == 256)
        and head_dim % 8 == 0
        and not dropout
    )
    return next((name for name in KERNELS if fits and name in installed), "buckets")


def kernel_of(
    model: Any, device: torch.device, dtype: torch.dtype, *, sinks: bool = False
) -> Kernel:
    """Return the kernel for the segments of a model, by its Hugging Face configuration."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "buckets"
    chunks = "chunked_attention" in (getattr(model, "layer_types", None) or ())
    others = ("attn_logit_softcapping", "v_head_dim")  # explicit scores; values of another size
    if sinks or chunks or any(getattr(model, name, None) for name in others):
        return "buckets"
    return choose_kernel(
        torch.cuda.get_device_capability(device),
        dtype,
        head_dim=_head_dim(model),
        dropout=getattr(model, "attention_dropout", 0.0),
        installed=installed(),
    )


def _head_dim(model: Any) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def newer_flash(
    kernel: Kernel, model: Any, device: torch.device
) -> AbstractContextManager[None, None]:
    """Have `varlen_attn` compute by FlashAttention 3 (Hopper) or 4 (Blackwell) in the block, in the
    whole process, where its package is installed; rank 0 prints which it is.
    """
    usual = kernel == "varlen_attn" and not torch.are_deterministic_algorithms_enabled()
    if device.type != "cuda" or not usual:
        return nullcontext()
    generation, _ = torch.cuda.get_device_capability(device)
    if generation == 9:
        return NEWER["FA3"]
    # FlashAttention 4 has no gradient of larger heads.
    return NEWER["FA4"] if generation == 10 and _head_dim(model) <= 128 else nullcontext()


def _activated(name: str) -> Callable[[], None]:
    said, restore = f"FlashAttention {name[-1]}", _nothing
    try:
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        activate_flash_attention_impl(name)
        restore = restore_flash_attention_impl
    except (ImportError, RuntimeError, ValueError) as error:
        said = f"FlashAttention 2, as the faster {name[-1]} can't be used ({error})"
    if os.environ.get("RANK", "0") == "0":
        print(f"attention is computed by {said}", file=sys.stderr)
    return restore


def _nothing() -> None:
    """Restore nothing."""


NEWER = {name: Overlapping(partial(_activated, name)) for name in ("FA3", "FA4")}


def installed() -> list[Kernel]:
    """Return the kernels that this PyTorch, and the packages beside it, have."""
    found: list[Kernel] = []
    if torch.backends.cuda.is_flash_attention_available():
        from torch.nn.attention.varlen import varlen_attn

        if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys():
            found.append("varlen_attn")
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except ImportError:  # it is not there, or is of another PyTorch
        return found
    return [*found, "flash_attn"]


def varlen_attention(
    kernel: Kernel,
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads dim"],
    cu_seqlens: Int[Tensor, "_"],
    longest: int,
    rule: Rule,
) -> Float[Tensor, "tokens heads dim"]:
    """Return the attention of each token to what the rule's window shows of its sequence.

    Sequences are laid end to end; `cu_seqlens` are the first token of each, and the end.

    Raises: ValueError for a rule that no kernel has.
    """
    fits = not (rule.explicit or rule.chunk or rule.dropout)
    require(fits, "attention's rule", f"must suit {kernel}", rule, "report it: buckets take it")
    rows = (cu_seqlens, cu_seqlens, longest, longest)
    options: dict[str, Any]
    window = (-1 if rule.window is None else rule.window - 1, 0)  # tokens before and after
    if kernel == "varlen_attn":
        from torch.nn.attention.varlen import varlen_attn

        grouped = query.shape[1] != key.shape[1]
        options = {"scale": rule.scaling, "window_size": window, "enable_gqa": grouped}
        return varlen_attn(query, key, value, *rows, **options)  # type: ignore[return-value]
    from flash_attn import flash_attn_varlen_func

    # PyTorch's asks for this setting by itself.
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = {"softmax_scale": rule.scaling, "window_size": window, "causal": True}
    return flash_attn_varlen_func(query, key, value, *rows, deterministic=deterministic, **options)

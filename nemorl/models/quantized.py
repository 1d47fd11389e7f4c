"""Linear layers whose weights are in 4 bits, by bitsandbytes: NF4 with quantized scales, as QLoRA
has them (Dettmers et al., 2023).
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nemorl.models.layers import linear_layers


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
            weight: Any = layer.weight
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(dequantized(weight, weight.data), requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)

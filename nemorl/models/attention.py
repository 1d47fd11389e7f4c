"""What all attention functions share that we give to `transformers`."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq dim"],
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Float[Tensor, "batch new heads dim"]:
    """Return the attention of each query; heads share keys and values where there are more."""
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


def use_attention(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Have a model attend by `function`. No mask function has this name, so no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)

"""Attention of new tokens to a cache of keys and values, as a function of `transformers`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nemorl.models.attention import PLAIN, Rule, attend, use_attention, without_cudnn_attention

ATTENTION_NAME = "nemorl_cached"


def cached_attention(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    mask: Tensor | None,
    *,
    rule: Rule = PLAIN,
) -> Float[Tensor, "batch new heads value_dim"]:
    """Return the attention of new tokens to the cached ones that mask and rule show.

    mask: `[batch, 1, new, seq]`, True for a token's own place and all before it. None: the new
    tokens are all there are. One new token's heads that share a key head are taken as several
    tokens of that head: repeating keys and values would copy the whole cache in every layer.
    """
    batch, heads, new, dim = query.shape
    if mask is None:
        return attend(query, key, value, rule=rule, causal=True)
    if rule.hides(key.shape[2]):
        places = torch.arange(key.shape[2], device=key.device)
        mask = mask & rule.visible(mask.sum(-1, keepdim=True) - 1, places[None])
    if new > 1 or rule.explicit:
        return attend(query, key, value, mask, rule=rule)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scaling
    )
    return output.reshape(batch, 1, heads, value.shape[3])


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Give the model this attention and no dropout inside the block. cuDNN would make a plan for
    each number of sequences and keys.
    """
    before = model.config._attn_implementation  # type: ignore[union-attr]
    was_training = model.training
    use_attention(model, ATTENTION_NAME, cached_attention)
    model.eval()
    try:
        with without_cudnn_attention:
            yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        model.train(was_training)

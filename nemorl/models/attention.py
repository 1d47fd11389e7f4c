"""Attention functions of our own in models of `transformers`."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemorl.accelerator import is_accelerator
from nemorl.checks import require
from nemorl.overlapping import Overlapping

WITHOUT_EFFECT = (
    *("cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits"),
    *("position_ids", "use_cache"),
)
"""Keywords that layers pass on, from which no attention is computed."""
UNSUPPORTED = {
    "is_causal": (None, True),
    **dict.fromkeys(("output_attentions", "s_aux", "softcap"), (None, False)),
}
"""Keywords that would change numbers, but for these values."""
LAYERS = ("full_attention", "sliding_attention")
"""Types of layers whose masks follow from their keywords."""


def attend(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Float[Tensor, "batch new heads value_dim"]:
    """Return the attention of each query; several query heads may share a key and value head.

    Args:
        mask: True, or the number that is added, where a query sees a key, `[batch, 1, new, seq]`.
        causal: whether a query sees the keys up to its own place alone, instead of a mask.
        dropout: share of the weights that is dropped.
        scaling: factor of query · key. None: 1 / sqrt(dim).
    """
    if mask is not None and is_accelerator(query.device):
        # With a mask no kernel of torch's but cuDNN's takes heads in groups: attention would be
        # computed whole, in memory that grows with the square of the length.
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
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


@Overlapping
def without_cudnn_attention() -> Callable[[], None]:
    """Keep torch from computing attention by cuDNN, in the whole process, in the block."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    return partial(cuda.enable_cudnn_sdp, before)


def use_attention(model: Any, name: str, function: Callable[..., Tensor]) -> None:
    """Have a model attend by function(query, key, value, mask, **options), whose options are
    dropout, scaling and its own keywords. No mask function has this name, so no mask is built.

    A keyword of the model's that is not an option is checked by `check_options`.

    Raises: ValueError for a model with layers of other types than full and sliding attention, such
    as chunks, which are in the mask alone.
    """
    from transformers import AttentionInterface

    for kind in getattr(model.config, "layer_types", None) or ():
        wanted = f"must be {' or '.join(LAYERS)}"
        require(kind in LAYERS, "the model's layer_types", wanted, kind, "take another model")
    own = signature(function).parameters.keys()

    @torch.compiler.disable  # it would be compiled again for each way in which segments can lie
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        rest = {name: each for name, each in options.items() if name not in own}
        width = getattr(options.get("context"), "width", key.shape[2])
        check_options({"is_causal": getattr(module, "is_causal", True), **rest}, width=width)
        given = {name: each for name, each in options.items() if name in own}
        return function(query, key, value, mask, **given), None

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def check_options(options: Mapping[str, Any], *, width: int) -> None:
    """Raise for keywords of a model that would give other numbers than plain causal attention.

    width: tokens of a row; a window at least as wide hides none.

    Raises: ValueError for a keyword with a value that is not supported; TypeError for one that is
    not known.

    >>> check_options({"position_ids": None, "sliding_window": 8, "softcap": None}, width=8)
    """
    for name, value in options.items():
        if name == "sliding_window":
            fits, wanted = value is None or value >= width, f"be None or at least {width}"
        elif name in UNSUPPORTED:
            fits = any(value is each for each in UNSUPPORTED[name])
            wanted = f"be {' or '.join(map(str, UNSUPPORTED[name]))}"
        elif name in WITHOUT_EFFECT:
            continue
        else:
            raise TypeError(
                f"the model's attention has a keyword {name!r} that is not supported here: take"
                " another model, or one of its other attention implementations"
            )
        require(fits, f"the attention's {name}", f"must {wanted}", value, "take another model")

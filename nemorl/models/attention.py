"""Attention functions of our own in models of `transformers`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from nemorl.accelerator import is_accelerator
from nemorl.checks import require
from nemorl.overlapping import Overlapping

WITHOUT_EFFECT = (
    *("cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits"),
    *("position_ids", "use_cache"),
)
"""Keywords that layers pass on, from which no attention is computed."""
UNSUPPORTED = {"is_causal": (None, True), "output_attentions": (None, False)}
"""Keywords that would change numbers, but for these values."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a layer attends: what a token sees, and how scores become weights."""

    scaling: float | None = None
    """Factor of query · key. None: 1 / sqrt(dim)."""
    dropout: float = 0.0
    window: int | None = None
    """How many tokens one sees, itself included."""
    chunk: int | None = None
    """Sequences are cut into chunks of so many tokens, of which none sees another."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: Float[Tensor, "heads"] | None = None
    """Score of a key without a value, which all tokens see."""

    @property
    def explicit(self) -> bool:
        return self.softcap is not None or self.sinks is not None

    def hides(self, length: int) -> bool:
        """Return whether a token of so long a sequence does not see all before it."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))

    def visible(
        self, queries: Int[Tensor, "... new 1"], keys: Int[Tensor, "... 1 seq"]
    ) -> Bool[Tensor, "... new seq"]:
        """Return which keys each query sees, by their positions in one sequence."""
        sees = keys <= queries
        if self.window is not None:
            sees &= keys > queries - self.window
        if self.chunk is not None:
            sees &= keys // self.chunk == queries // self.chunk
        return sees


PLAIN = Rule()


def attend(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    mask: Tensor | None = None,
    *,
    rule: Rule = PLAIN,
    causal: bool = False,
) -> Float[Tensor, "batch new heads value_dim"]:
    """Return the attention of each query; several query heads may share a key and value head.

    mask: True, or the number that is added, where a query sees a key, `[batch, 1, new, seq]`, with
    the rule's window and chunks.
    causal: a query sees what the rule shows it of a sequence, instead of a mask.
    """
    if causal and (rule.explicit or rule.hides(query.shape[2])):
        places = torch.arange(query.shape[2], device=query.device)
        mask, causal = rule.visible(places[:, None], places[None])[None, None], False
    if rule.explicit:
        return _explicit(query, key, value, mask, rule).transpose(1, 2).contiguous()
    if mask is not None and is_accelerator(query.device):
        # With a mask no kernel but cuDNN's takes heads in groups: memory would be quadratic.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        dropout_p=rule.dropout,
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


def _explicit(
    query: Float[Tensor, "batch heads new dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    mask: Tensor | None,
    rule: Rule,
) -> Float[Tensor, "batch heads new value_dim"]:
    batch, heads, new, dim = query.shape
    kv_heads = key.shape[1]
    # Heads that share a key are further tokens of it: nothing is repeated.
    grouped = query.reshape(batch, kv_heads, -1, dim)
    scores = (grouped @ key.transpose(2, 3)).view(batch, kv_heads, -1, new, key.shape[2])
    scores = scores * (dim**-0.5 if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask[:, :, None], -torch.inf)
    elif mask is not None:
        scores = scores + mask[:, :, None]
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(batch, -1, -1, new, 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    weights = dropout(weights, rule.dropout, training=rule.dropout > 0)
    return (weights.flatten(2, 3) @ value).view(batch, heads, new, -1)


@Overlapping
def without_cudnn_attention() -> Callable[[], None]:
    """Keep torch from computing attention by cuDNN, in the whole process, in the block."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    return partial(cuda.enable_cudnn_sdp, before)


def use_attention(model: Any, name: str, function: Callable[..., Tensor]) -> None:
    """Have a model attend by function(query, key, value, mask, rule=, **own), with the keywords of
    the model's that the function has. No mask function has this name, so no mask is built.
    """
    from transformers import AttentionInterface

    own = signature(function).parameters.keys()

    @torch.compiler.disable  # it would be compiled again for each way in which segments can lie
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        given = {name: options.pop(name) for name in own & options.keys()}
        options.setdefault("is_causal", getattr(module, "is_causal", True))
        return function(query, key, value, mask, rule=rule_of(module, options), **given), None

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def rule_of(module: Any, options: Mapping[str, Any]) -> Rule:
    """Return how a layer of `transformers` attends, by the keywords that it gives.

    Chunks are in the configuration alone. A keyword that is not known is a TypeError.
    """
    names = {"sliding_window": "window", "s_aux": "sinks"}
    found: dict[str, Any] = {}
    for name, value in options.items():
        field = names.get(name, name)
        if field in Rule.__dataclass_fields__:
            found[field] = value
        elif name in UNSUPPORTED:
            require(
                any(value is each for each in UNSUPPORTED[name]),
                f"the attention's {name}",
                f"must be {' or '.join(map(str, UNSUPPORTED[name]))}",
                value,
                "take another model",
            )
        elif name not in WITHOUT_EFFECT:
            raise TypeError(
                f"the model's attention has a keyword {name!r} that is not supported here: take"
                " another model"
            )
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and layer is not None and kinds[layer] == "chunked_attention":
        found["chunk"] = config.attention_chunk_size
    return Rule(**found)

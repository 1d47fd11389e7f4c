"""The model types whose layers megatron-core's own specs build: what files call the parts of a
layer, and what differs in its computation. Free of torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["whole", "rows", "columns", "gated", "qkv"]
"""What a rank of tensor parallelism has of a parameter: all, rows, columns, rows of both the gate
and the up projection, or groups of heads of queries, keys and values.
"""
Parts = dict[str, tuple[Kind, tuple[str, ...]]]
"""By a parameter of megatron-core's layer its kind, and the tensors of Hugging Face's layer that it
is made of.
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type; what is not said of it is as in Llama."""

    qkv: tuple[str, ...] = tuple(f"self_attn.{each}_proj" for each in "qkv")
    """Projections to queries, keys and values; or one that has the rows of all three."""
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The feed-forward's first: to gate and up; or one that has the rows of both."""
    outer: str = "mlp.down_proj"
    gated: bool = True
    """Whether the feed-forward has a gate; else `inner` is one projection."""
    activation: str = "silu"
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    eps: str = "rms_norm_eps"
    qk_norm: bool = False
    qkv_bias: bool = False
    """Whether projections to queries, keys and values alone have a bias."""
    bias: str | None = None
    """The setting that says whether all linear layers have a bias; None: no setting does."""
    experts: tuple[str, str, str, str] | None = None
    """What files call a mixture of experts, and an expert's gate, up and down projection."""

    def has_bias(self, hf: Any) -> bool:
        return self.bias is not None and bool(getattr(hf, self.bias))

    def layer(self) -> Parts:
        attention = "self_attention."
        inner: Kind = "gated" if self.gated else "rows"
        norms = {
            "input_layernorm": "input_layernorm",
            f"{attention}q_layernorm": "self_attn.q_norm",
            f"{attention}k_layernorm": "self_attn.k_norm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }
        found: Parts = {}
        for leaf in ("weight", "bias"):
            # Ranks add the bias of a product over columns once, to its sum.
            columns: Kind = "columns" if leaf == "weight" else "whole"
            linear: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
                *((own, "whole", (theirs,)) for own, theirs in norms.items()),
                (f"{attention}linear_qkv", "qkv", self.qkv),
                (f"{attention}linear_proj", columns, ("self_attn.o_proj",)),
                ("mlp.linear_fc1", inner, self.inner),
                ("mlp.linear_fc2", columns, (self.outer,)),
            )
            for own, kind, theirs in linear:
                found[f"{own}.{leaf}"] = kind, tuple(f"{each}.{leaf}" for each in theirs)
        return found


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=("mlp", "gate_proj", "up_proj", "down_proj")),
    "mixtral": Family(experts=("block_sparse_moe", "w1", "w3", "w2")),
    "smollm3": Family(),
    "phi3": Family(qkv=("self_attn.qkv_proj",), inner=("mlp.gate_up_proj",)),
    "starcoder2": Family(
        inner=("mlp.c_fc",),
        outer="mlp.c_proj",
        gated=False,
        activation="gelu_pytorch_tanh",
        norm="LayerNorm",
        eps="norm_epsilon",
        bias="use_bias",
    ),
}
"""By model type. `transformers` has each kind of matrix of all experts in one tensor, under names
of its own.
"""


def without_rope(hf: Any) -> list[int] | None:
    """Return for each layer 1 where it does not rotate queries and keys, else 0; None where all do.

    >>> from types import SimpleNamespace as Config
    >>> without_rope(Config(num_hidden_layers=2, no_rope_layers=[1, 0, 1]))
    [0, 1]
    """
    rotates = getattr(hf, "no_rope_layers", None) or []
    found = [int(not each) for each in rotates[: hf.num_hidden_layers]]
    return found if any(found) else None

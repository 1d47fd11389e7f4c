"""The sizes of a decoder model, from its config.json: its matrices, and how a plan cuts them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Literal

from nemorl.checks import require
from nemorl.parallel.megatron.families import FAMILIES
from nemorl.parallel.megatron.limits import check_model
from nemorl.parallel.plan import ParallelPlan

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""A layer's matrices, which may get adapters."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
OF_EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
    "qwen3_moe": {
        **{"num_key_value_heads": 4, "use_sliding_window": False, "intermediate_size": 6144},
        **{"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    },
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""transformers' own values for what a config.json does not say."""


@dataclass(frozen=True)
class Matrix:
    """Parameters of one shape.

    `tp` is the axis that tensor parallelism splits; None: each device has all of it.
    """

    name: str
    shape: tuple[int, ...]
    tp: Literal[0, 1] | None = None
    of_experts: bool = False
    """Whether each device has some of the experts, or without ep a part of each."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def on(self, plan: ParallelPlan) -> int:
        """Return the numbers that a device computes with: tensor parallelism's share."""
        if self.of_experts:
            return self.size // (plan.ep if plan.ep > 1 else plan.tp)
        return self.size // (plan.tp if self.tp is not None else 1)

    def shard(self, plan: ParallelPlan) -> int:
        """Return the numbers that a device keeps: FSDP2 cuts the first axis, rounding up."""
        rows, *rest = (
            size // plan.tp if axis == self.tp else size for axis, size in enumerate(self.shape)
        )
        return -(-rows // shard_ranks(plan)) * prod(rest)


def shard_ranks(plan: ParallelPlan) -> int:
    """Return the devices over which FSDP2 cuts parameters: dp_shard · cp."""
    return (plan.dp_shard or 1) * plan.cp


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes by their Hugging Face names, as `ParallelPlan.check` reads them."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    num_local_experts: int = 0
    """Experts per layer; 0: each layer has one feed-forward block."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def q_size(self) -> int:
        """Width of all queries together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys together, or of all values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.model_type].qk_norm

    def linear(self) -> Iterator[tuple[str, tuple[int, int], bool, Literal[0, 1]]]:
        """Yield name, shape, whether there is a bias, and tp's axis of a layer's matrices."""
        hidden, inner = self.hidden_size, self.intermediate_size
        for name, rows in (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size)):
            yield f"self_attn.{name}_proj", (rows, hidden), self.qkv_bias, 0
        yield "self_attn.o_proj", (hidden, self.q_size), self.output_bias, 1
        if self.num_local_experts:
            return
        yield "mlp.gate_proj", (inner, hidden), self.mlp_bias, 0
        yield "mlp.up_proj", (inner, hidden), self.mlp_bias, 0
        yield "mlp.down_proj", (hidden, inner), self.mlp_bias, 1

    def layer(self) -> Iterator[Matrix]:
        """Yield the parameters of one layer."""
        for name, shape, bias, axis in self.linear():
            yield Matrix(f"{name}.weight", shape, axis)
            if bias:
                yield Matrix(f"{name}.bias", shape[:1], None if axis else 0)
        if count := self.num_local_experts:
            inner, hidden = self.moe_intermediate_size, self.hidden_size
            yield Matrix("mlp.gate.weight", (count, hidden))
            for name, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
                yield Matrix(f"mlp.experts.{name}_proj", (count, *shape), of_experts=True)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Matrix(f"{name}.weight", (self.hidden_size,))
        for name in ("self_attn.q_norm", "self_attn.k_norm") if self.qk_norm else ():
            yield Matrix(f"{name}.weight", (self.head_dim,))

    def ends(self) -> Iterator[Matrix]:
        """Yield the parameters outside the layers; a tied head is the embedding."""
        yield Matrix("embed_tokens.weight", (self.vocab_size, self.hidden_size), 0)
        yield Matrix("norm.weight", (self.hidden_size,))
        if not self.tie_word_embeddings:
            yield Matrix("lm_head.weight", (self.vocab_size, self.hidden_size), 0)

    def num_parameters(self) -> int:
        return self.shard_parameters(ParallelPlan())

    def active_parameters(self) -> int:
        """Return the numbers that a token is multiplied with."""
        experts = sum(matrix.size for matrix in self.layer() if matrix.of_experts)
        idle = self.num_local_experts - self.num_experts_per_tok
        unused = experts * idle // self.num_local_experts if self.num_local_experts else 0
        return self.num_parameters() - self.num_hidden_layers * unused

    def shard_parameters(self, plan: ParallelPlan) -> int:
        """Return the numbers that each device keeps, with the padding of FSDP2's pieces."""
        layer = sum(matrix.shard(plan) for matrix in self.layer())
        return self.num_hidden_layers * layer + sum(matrix.shard(plan) for matrix in self.ends())


def model_shape(
    config: Mapping[str, Any], *, source: str = "the model's configuration"
) -> ModelShape:
    """Read the sizes in a config.json.

    Raises: ValueError for a model that is not supported, and where a size is missing.
    """
    kind = str(config.get("model_type"))
    values = {"model_type": kind, **DEFAULTS.get(kind, {}), **config}
    wanted, remedy = f"must be one of {', '.join(DEFAULTS)} for nemorl plan", "plan one of them"
    require(kind in DEFAULTS, "the model's type", wanted, kind, remedy)
    experts: dict[str, int] = {}
    if FAMILIES[kind].experts:
        check_model(SimpleNamespace(**values))
        values["num_local_experts"] = config.get("num_experts") or values["num_local_experts"]
        values.setdefault("moe_intermediate_size", values.get("intermediate_size"))
        experts = {name: values[name] for name in OF_EXPERTS}
    for name in (*SIZES, *experts):
        size = values.get(name)
        valid = isinstance(size, int) and size > 0
        require(valid, "model", f"must say its {name}", size, f"complete {source}")
    bias, heads = bool(values.get("attention_bias")), values["num_attention_heads"]
    return ModelShape(
        model_type=kind,
        **{name: values[name] for name in SIZES},
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and bias),
        output_bias=kind in ("llama", "qwen3") and bias,
        mlp_bias=kind == "llama" and bool(values.get("mlp_bias")),
        **experts,
    )

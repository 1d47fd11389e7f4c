"""The sizes of a decoder model, read from its config.json: which matrices it has, and how a plan
cuts them. Pure and free of torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemorl.checks import require
from nemorl.parallel.plan import ParallelPlan

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are laid out as here."""

UNSAID: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
}
"""What transformers takes where a config.json says nothing."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Parameters of one shape.

    `tp` is the axis that tensor parallelism splits; None: each device has all of it.
    """

    name: str
    shape: tuple[int, ...]
    tp: Literal[0, 1] | None = None

    @property
    def size(self) -> int:
        """Numbers in it."""
        rows, *rest = self.shape
        return rows * (rest[0] if rest else 1)

    def on(self, plan: ParallelPlan) -> int:
        """Numbers of it that a device holds while it computes: the share that tensor parallelism
        leaves.
        """
        return self.size // (plan.tp if self.tp is not None else 1)

    def shard(self, plan: ParallelPlan) -> int:
        """Numbers of it that a device keeps.

        FSDP2 cuts the first axis into equal pieces, rounded up.
        """
        rows, *rest = self.shape
        width = rest[0] if rest else 1
        rows, width = (
            (rows // plan.tp if self.tp == 0 else rows),
            (width // plan.tp if self.tp == 1 else width),
        )
        return -(-rows // shard_ranks(plan)) * width


def shard_ranks(plan: ParallelPlan) -> int:
    """Devices over which parameters are cut by FSDP2: those of dp_shard and of cp, which need the
    same parameters.

    >>> shard_ranks(ParallelPlan(dp_shard=4, cp=2, tp=2))
    8
    """
    return (plan.dp_shard or 1) * plan.cp


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes by the names of Hugging Face configurations, so that `ParallelPlan.check` takes it for
    one.
    """

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
        """Whether queries and keys are normed, as in Qwen3."""
        return self.model_type == "qwen3"

    def layer(self) -> Iterator[Matrix]:
        """The parameters of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        wide = [("self_attn.q_proj", self.q_size, self.qkv_bias), ("self_attn.k_proj", self.kv_size, self.qkv_bias),
                ("self_attn.v_proj", self.kv_size, self.qkv_bias), ("mlp.gate_proj", inner, self.mlp_bias),
                ("mlp.up_proj", inner, self.mlp_bias)]  # fmt: skip
        for name, rows, bias in wide:
            yield Matrix(name=f"{name}.weight", shape=(rows, hidden), tp=0)
            if bias:
                yield Matrix(name=f"{name}.bias", shape=(rows,), tp=0)
        for name, columns, bias in [
            ("self_attn.o_proj", self.q_size, self.output_bias),
            ("mlp.down_proj", inner, self.mlp_bias),
        ]:
            yield Matrix(name=f"{name}.weight", shape=(hidden, columns), tp=1)
            if bias:
                yield Matrix(name=f"{name}.bias", shape=(hidden,))
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Matrix(name=f"{name}.weight", shape=(hidden,))
        for name in ("self_attn.q_norm", "self_attn.k_norm") if self.qk_norm else ():
            yield Matrix(name=f"{name}.weight", shape=(self.head_dim,))

    def ends(self) -> Iterator[Matrix]:
        """The parameters before and after the layers; a tied head is the embedding, and counts
        once.
        """
        yield Matrix(name="embed_tokens.weight", shape=(self.vocab_size, self.hidden_size), tp=0)
        yield Matrix(name="norm.weight", shape=(self.hidden_size,))
        if not self.tie_word_embeddings:
            yield Matrix(name="lm_head.weight", shape=(self.vocab_size, self.hidden_size), tp=0)

    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.num_hidden_layers * sum(matrix.size for matrix in self.layer()) + sum(
            matrix.size for matrix in self.ends()
        )

    def shard_parameters(self, plan: ParallelPlan) -> int:
        """Numbers that each device of the plan keeps, the padding of FSDP2's pieces included."""
        return self.num_hidden_layers * sum(matrix.shard(plan) for matrix in self.layer()) + sum(
            matrix.shard(plan) for matrix in self.ends()
        )


def model_shape(
    config: Mapping[str, Any], *, source: str = "the model's configuration"
) -> ModelShape:
    """The sizes that a config.json holds. Raises ValueError for a model that could not be trained
    here, or where a size is missing.

    >>> sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    >>> model_shape({"model_type": "llama", **sizes}).num_parameters()
    95040
    """
    kind = str(config.get("model_type"))
    require(
        kind in SUPPORTED,
        "model",
        f"must be one of {', '.join(SUPPORTED)}",
        kind,
        f"{source} names a model type that can't be trained here",
    )
    said = {**UNSAID.get(kind, {}), **config}
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    for name in names:
        require(
            isinstance(said.get(name), int) and said[name] > 0,
            "model",
            f"must say its {name}",
            said.get(name),
            f"complete {source}",
        )
    full = set(said.get("layer_types") or ["full_attention"]) == {"full_attention"}
    window = said.get("sliding_window") if said.get("use_sliding_window", True) else None
    require(
        full and not window,
        "model",
        "must have full attention",
        f"of a sliding window of {window} tokens",
        "take a model without",
    )
    bias = bool(said.get("attention_bias"))
    return ModelShape(
        model_type=kind,
        **{name: said[name] for name in names},
        num_key_value_heads=said.get("num_key_value_heads") or said["num_attention_heads"],
        head_dim=said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"],
        tie_word_embeddings=bool(said.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and bias),
        output_bias=kind in ("llama", "qwen3") and bias,
        mlp_bias=kind == "llama" and bool(said.get("mlp_bias")),
    )

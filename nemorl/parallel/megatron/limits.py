"""What trainer.backend megatron can't do, said before anything starts. Free of torch."""

from dataclasses import dataclass
from typing import Any, Literal

from nemorl.checks import require
from nemorl.parallel.config import TrainingSections
from nemorl.parallel.plan import ParallelPlan, TrainingTraits, num_experts

Kind = Literal["whole", "rows", "columns", "gated", "qkv"]
"""What a rank of tensor parallelism has of a parameter: all, rows, columns, rows of both the gate
and the up projection, or groups of heads of queries, keys and values.
"""
Parts = dict[str, tuple[Kind, tuple[str, ...]]]
"""By a parameter of megatron-core's layer its kind, and the Hugging Face tensors in it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type; the defaults are Llama's."""

    qkv: tuple[str, ...] = tuple(f"self_attn.{each}_proj" for each in "qkv")
    """Projections to queries, keys and values; or one with the rows of all three."""
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The feed-forward's first: to gate and up; or one with the rows of both."""
    outer: str = "mlp.down_proj"
    gated: bool = True
    """Whether the feed-forward has a gate."""
    activation: str = "silu"
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    eps: str = "rms_norm_eps"
    qk_norm: bool = False
    qkv_bias: bool = False
    """Whether projections to queries, keys and values alone have a bias."""
    bias: str | None = None
    """The setting, if any, of whether all linear layers have a bias."""
    experts: tuple[str, str, str, str] | None = None
    """Names in files of a mixture of experts, and of an expert's gate, up and down projection."""

    def layer(self) -> Parts:
        found: Parts = {}
        for leaf in ("weight", "bias"):
            # The bias of a product over columns is added once, to the sum over ranks.
            columns: Kind = "columns" if leaf == "weight" else "whole"
            parts: Parts = {
                "input_layernorm": ("whole", ("input_layernorm",)),
                "self_attention.q_layernorm": ("whole", ("self_attn.q_norm",)),
                "self_attention.k_layernorm": ("whole", ("self_attn.k_norm",)),
                "pre_mlp_layernorm": ("whole", ("post_attention_layernorm",)),
                "self_attention.linear_qkv": ("qkv", self.qkv),
                "self_attention.linear_proj": (columns, ("self_attn.o_proj",)),
                "mlp.linear_fc1": ("gated" if self.gated else "rows", self.inner),
                "mlp.linear_fc2": (columns, (self.outer,)),
            }
            for own, (kind, theirs) in parts.items():
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
"""By model type."""


def without_rope(hf: Any) -> list[int] | None:
    """Return for each layer 1 where it does not rotate queries and keys, else 0; None where all do.

    >>> from types import SimpleNamespace as Config
    >>> without_rope(Config(num_hidden_layers=2, no_rope_layers=[1, 0, 1]))
    [0, 1]
    """
    rotates = getattr(hf, "no_rope_layers", None) or []
    found = [int(not each) for each in rotates[: hf.num_hidden_layers]]
    return found if any(found) else None


SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the rest of a batch."""
# No adapters: PEFT adapts nn.Linear, and here q, k and v are one matrix of another class.
# megatron-core's own need Megatron-Bridge and Transformer Engine.
traits = TrainingTraits(
    packages=("megatron", "psutil"),
    needs_ranks=True,
    pipelines=True,
    experts=("parallel.ep", "router_replay", "router_aux_loss_coef"),
    repeats_kv_heads=True,
    shards="optimizer",
    heads=("lm", "scalar"),
    adapters=False,
    generates=True,
)


def check(config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError for settings that have no effect here or are not supported, and for a model
    with other parts.
    """
    dtensor = "remove it, or take --trainer.backend dtensor"
    name, dtype = config.optimizer.name, plan.reduce_dtype
    # Its optimizer keeps spans of flattened parameters, not matrices.
    _require(name == "adamw", "optimizer.name", "be adamw", name, dtensor)
    _require(not plan.compile, "parallel.compile", "be off", plan.compile, dtensor)
    _require(
        dtype == "float32" or plan.param_dtype != "float32",  # None: depends on the device
        "parallel.reduce_dtype",
        "be float32 unless parallel.param_dtype is bfloat16",
        dtype,
        "remove it",
    )
    if model is not None:
        check_model(model)
        kind = "a mixture of experts" if num_experts(model) else "a dense model"
        absent, found = "mlp" if num_experts(model) else "moe", plan.recompute_modules
        require(
            absent not in found,
            "parallel.recompute_modules",
            f"must not have {absent}, which {kind} lacks",
            found,
            "remove it",
        )


def check_model(model: Any) -> None:
    """Raise ValueError where a model (a Hugging Face configuration) has parts that are not
    supported.
    """
    kind = model.model_type
    _require(kind in FAMILIES, "the model's type", f"be {', '.join(FAMILIES)}", kind)
    windowed = getattr(model, "use_sliding_window", True)
    window = getattr(model, "sliding_window", None) if windowed else None
    kinds = set(getattr(model, "layer_types", None) or ["full_attention"])
    fits = not window and kinds == {"full_attention"}
    _require(fits, "the model's sliding attention window", "be off", window)
    # transformers 4 wrote rope_scaling.
    given: Any = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None)
    rope = (given or {}).get("rope_type", (given or {}).get("type", "default"))
    _require(
        rope in ROPE_TYPES, "the model's rope_type", f"be one of {', '.join(ROPE_TYPES)}", rope
    )
    for name, only in {**SUPPORTED, "hidden_act": FAMILIES[kind].activation}.items():
        value = getattr(model, name, only)
        _require(value == only, f"the model's {name}", f"be {only}", value)


def _require(
    fits: bool,
    field: str,
    wanted: str,
    value: object,
    remedy: str = "take --trainer.backend dtensor",
) -> None:
    require(fits, field, f"must {wanted} with trainer.backend megatron", value, remedy)

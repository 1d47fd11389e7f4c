"""What trainer.backend megatron is and can't do, before anything starts. Free of torch."""

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
"""Rotary frequencies that are the model's alone, whatever lies beside a sequence."""
# No adapters: PEFT adapts nn.Linear, and here q, k and v are one matrix of another class, whose
# adapter would be another model. megatron-core's own are in Megatron-Bridge, which needs
# Transformer Engine.
traits = TrainingTraits(
    packages=("megatron", "psutil"),
    needs_ranks=True,
    pipelines=True,
    experts=("parallel.ep", "router_replay", "router_aux_loss_coef"),
    repeats_kv_heads=True,
    shards="optimizer",
    adapters=False,
    generates=True,
)


def check(config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError for settings that have no effect here or are not supported, and for a model
    with other parts.
    """
    dtensor = "remove it, or take --trainer.backend dtensor"
    may_be_bfloat16 = plan.param_dtype != "float32"  # None: the device is not known yet
    name = config.optimizer.name
    for field, value, fits, requirement, remedy in (
        # Its optimizer keeps spans of flattened parameters, not matrices.
        ("optimizer.name", name, name == "adamw", "be adamw", dtensor),
        ("parallel.compile", plan.compile, not plan.compile, "be off", dtensor),
        (
            "parallel.reduce_dtype",
            plan.reduce_dtype,
            may_be_bfloat16 or plan.reduce_dtype == "float32",
            "be float32 unless parallel.param_dtype is bfloat16",
            "remove it",
        ),
    ):
        require(fits, field, f"must {requirement} with trainer.backend megatron", value, remedy)
    if model is not None:
        check_model(model)
        check_recomputed(model, plan)


def check_recomputed(model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError where a model (a Hugging Face configuration) lacks what is recomputed."""
    absent, kind = (
        ("mlp", "a mixture of experts") if num_experts(model) else ("moe", "a dense model")
    )
    found = plan.recompute_modules
    requirement = f"must not have {absent}, which {kind} lacks"
    require(absent not in found, "parallel.recompute_modules", requirement, found, "remove it")


def check_model(model: Any) -> None:
    """Raise ValueError where a model (a Hugging Face configuration) has parts that are not
    supported.
    """
    remedy = "take --trainer.backend dtensor"
    wanted = f"must be {', '.join(FAMILIES)} with trainer.backend megatron"
    require(model.model_type in FAMILIES, "the model's type", wanted, model.model_type, remedy)
    windowed = getattr(model, "use_sliding_window", True)
    window = getattr(model, "sliding_window", None) if windowed else None
    kinds = set(getattr(model, "layer_types", None) or ["full_attention"])
    wanted = "must be off with trainer.backend megatron"
    fits = not window and kinds == {"full_attention"}
    require(fits, "the model's sliding attention window", wanted, window, remedy)
    # transformers 4 wrote rope_scaling.
    given: Any = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None)
    kind = (given or {}).get("rope_type", (given or {}).get("type", "default"))
    wanted = f"must be one of {', '.join(ROPE_TYPES)} with trainer.backend megatron"
    require(kind in ROPE_TYPES, "the model's rope_type", wanted, kind, remedy)
    activation = {"hidden_act": FAMILIES[model.model_type].activation}
    for name, wanted in {**SUPPORTED, **activation}.items():
        value = getattr(model, name, wanted)
        requirement = f"must be {wanted} with trainer.backend megatron"
        require(value == wanted, f"the model's {name}", requirement, value, remedy)

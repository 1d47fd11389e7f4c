"""What trainer.backend megatron is and can't do, before anything starts. Free of torch."""

from typing import Any

from nemorl.checks import require
from nemorl.parallel.config import TrainingSections
from nemorl.parallel.megatron.families import FAMILIES
from nemorl.parallel.plan import ParallelPlan, num_experts
from nemorl.parallel.traits import TrainingTraits

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

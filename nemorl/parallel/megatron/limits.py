"""What trainer.backend megatron can't do, before anything starts. Free of torch."""

from importlib.util import find_spec
from typing import Any

from nemorl.checks import refuse_unused, require
from nemorl.parallel.plan import ParallelPlan

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
"""Values that a model's configuration must have."""
OF_EXPERTS = ("router_replay", "router_aux_loss_coef")
"""Settings of the section trainer for mixtures of experts."""


def check(config: Any) -> None:
    """Raise ValueError for settings that have no effect here or are not supported.

    config: has the sections lora, parallel and trainer.
    """
    plan: ParallelPlan = config.parallel
    missing = [name for name in ("megatron", "psutil") if find_spec(name) is None]
    install = "pip install 'nemorl[megatron]'"
    requirement = "must be installed for megatron"
    require(not missing, "trainer.backend", requirement, "megatron", install)
    dtensor = "remove it, or take --trainer.backend dtensor"
    offloads = config.trainer.offload_during_generation
    in_bfloat16 = plan.param_dtype == "bfloat16"
    for field, value, fits, requirement, remedy in (
        ("lora.rank", config.lora.rank, not config.lora.rank, "be 0", dtensor),
        (
            "parallel.dp_replicate",
            plan.dp_replicate,
            plan.dp_replicate == 1,
            "be 1",
            "parallel.dp_shard has more data parallel ranks, which share the optimizer's state",
        ),
        ("parallel.compile", plan.compile, not plan.compile, "be off", dtensor),
        ("trainer.offload_during_generation", offloads, not offloads, "be off", dtensor),
        ("parallel.cpu_offload", plan.cpu_offload, not plan.cpu_offload, "be off", dtensor),
        (
            "parallel.reduce_dtype",
            plan.reduce_dtype,
            in_bfloat16 or plan.reduce_dtype == "float32",
            "be float32 unless parallel.param_dtype is bfloat16",
            "remove it",
        ),
    ):
        require(fits, field, f"must {requirement} with trainer.backend megatron", value, remedy)


def check_elsewhere(trainer: Any) -> None:
    """Raise ValueError for settings of the section trainer that other backends do not have."""
    requirement, remedy = "needs trainer.backend megatron", "add --trainer.backend megatron"
    refuse_unused("trainer", trainer, requirement, remedy, names=OF_EXPERTS)


def check_model(model: Any, trainer: Any = None) -> None:
    """Raise ValueError where a model (a Hugging Face configuration) has parts that are not
    supported, or lacks experts that settings of the section trainer are for.
    """
    if trainer is not None and not getattr(model, "num_local_experts", None):
        requirement = "is for models with experts"
        refuse_unused("trainer", trainer, requirement, "remove it", names=OF_EXPERTS)
    for name, wanted in SUPPORTED.items():
        value = getattr(model, name, wanted)
        requirement = f"must be {wanted} with trainer.backend megatron"
        remedy = "take --trainer.backend dtensor"
        require(value == wanted, f"the model's {name}", requirement, value, remedy)

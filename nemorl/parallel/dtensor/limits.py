"""What trainer.backend dtensor is and can't do, before anything starts. Free of torch."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from nemorl.checks import require, warn
from nemorl.models.capabilities import Capability, Proofs
from nemorl.parallel.config import BackendConfig, TrainingSections
from nemorl.parallel.plan import ParallelPlan, TrainingTraits

traits = TrainingTraits(
    heads=("lm", "scalar"),
    proves=True,
    experts=("router_replay", "router_aux_loss_coef", "router_bias_update_rate"),
)


def check(config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError for settings that can't work, or need a package that is not installed."""
    quantize = config.lora.quantize
    for setting, needed in (
        ("optimizer.name adamw8bit", config.optimizer.name == "adamw8bit"),
        ("lora.quantize nf4", quantize == "nf4"),
    ):
        if needed and find_spec("bitsandbytes") is None:
            raise ValueError(
                f"{setting} needs the package bitsandbytes, which can't be imported: pip install"
                " 'nemorl[bitsandbytes]'"
            )
    rate = config.trainer.router_bias_update_rate
    require(
        not (rate and config.lora.rank),
        "trainer.router_bias_update_rate",
        "must be 0 with lora.rank",
        rate,
        "remove it: the biases are the base model's, which adapters leave as it is",
    )
    require(
        not (config.trainer.router_replay and plan.compile),
        "parallel.compile",
        "must be off with trainer.router_replay",
        plan.compile,
        "remove it",
    )
    check_quantized(quantize, ranks=plan.num_ranks > 1 or plan.needs_ranks)


def check_quantized(quantize: str, *, ranks: bool) -> None:
    """Raise ValueError for weights in 4 bits where FSDP2 would shard them."""
    require(
        quantize == "none" or not ranks,
        "lora.quantize",
        "must be none on ranks, whose FSDP2 can't divide weights in 4 bits",
        quantize,
        "train on one device, without torchrun, parallel.compile, cpu_offload and selective",
    )


def settled(config: BackendConfig, kind: str, proofs: Proofs) -> BackendConfig:
    """Return settings that use only what is proved of a model of type `kind`; a warning names what
    is left out: packed or padded rows, shared prompts.

    Raises: ValueError for a model that fails row by row, and for settings that ask for what fails.
    """
    trainer, plan, others = config.trainer, config.parallel, []

    def fails(name: Capability) -> bool:
        return not proofs[name].holds

    for name in ("alone", "head"):
        if fails(name):
            raise ValueError(
                f"the model must have the numbers of transformers here, but {kind!r} has not, even"
                f" row by row ({proofs[name].reason}): take another model"
            )
    checkpointing = "parallel.activation_checkpointing"
    asked: tuple[tuple[Capability, str, object, object], ...] = (
        ("fsdp", "parallel", plan.data_ranks > 1 or plan.needs_ranks, plan),
        ("tp", "parallel.tp", plan.tp > 1, plan.tp),
        ("cp", "parallel.cp", plan.cp > 1, plan.cp),
        ("lora", "lora.rank", config.lora.rank, config.lora.rank),
        ("recompute", checkpointing, plan.recomputes != "none", plan.recomputes),
    )
    for name, field, used, value in asked:
        wanted = f"must be off for {kind} ({proofs[name].reason})"
        require(not (used and fails(name)), field, wanted, value, "remove it")
    if trainer.sequence_packing and fails("packed"):
        trainer = replace(trainer, sequence_packing=False, packed_row_tokens=None)
        others.append(f"rows are not packed ({proofs['packed'].reason})")
    if trainer.share_prompts and fails("shared_prompts"):
        trainer = replace(trainer, share_prompts=False)
        others.append(f"prompts are not shared ({proofs['shared_prompts'].reason})")
    if trainer.train_micro_batch_size != 1 and fails("padded"):
        trainer = replace(trainer, train_micro_batch_size=1, micro_batch_tokens=None)
        others.append(f"rows are computed one by one ({proofs['padded'].reason})")
    if others:
        warn(f"with {kind} {', '.join(others)}; nemorl models check shows what it can do")
    return replace(config, trainer=trainer)

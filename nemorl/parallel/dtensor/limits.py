"""What trainer.backend dtensor is and can't do, before anything starts. Free of torch."""

from importlib.util import find_spec
from typing import Any

from nemorl.checks import require
from nemorl.parallel.limits import TrainingSections
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traits import TrainingTraits

traits = TrainingTraits(heads=("lm", "scalar"))


def check(config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError for what needs a package that is not installed, and for weights in 4 bits on
    ranks.
    """
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
    check_quantized(quantize, ranks=plan.num_ranks > 1 or plan.needs_ranks)


def check_quantized(quantize: str, *, ranks: bool) -> None:
    """Raise ValueError for weights in 4 bits where FSDP2 would shard them: bitsandbytes keeps
    each as one piece.
    """
    requirement = "must be none on ranks, whose FSDP2 can't divide weights in 4 bits"
    remedy = "train on one device, without torchrun, parallel.compile, cpu_offload and selective"
    require(quantize == "none" or not ranks, "lora.quantize", requirement, quantize, remedy)

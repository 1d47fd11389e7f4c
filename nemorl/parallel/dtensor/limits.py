"""What trainer.backend dtensor is and can't do, before anything starts. Free of torch."""

from importlib.util import find_spec
from typing import Any

from nemorl.parallel.limits import TrainingSections
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traits import TrainingTraits

traits = TrainingTraits(heads=("lm", "scalar"))


def check(config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
    """Raise ValueError for an optimizer that is not installed."""
    if config.optimizer.name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise ValueError(
            "optimizer.name adamw8bit needs the package bitsandbytes, which can't be imported: pip"
            " install 'nemorl[bitsandbytes]'"
        )

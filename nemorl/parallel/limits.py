"""What a training backend says before it is imported. Free of torch."""

from typing import Any, Protocol, runtime_checkable

from nemorl.parallel.config import LoRAConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traits import TrainingTraits


@runtime_checkable
class TrainingSections(Protocol):
    """The settings that a check reads: sections of a run's or a backend's configuration."""

    @property
    def lora(self) -> LoRAConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def parallel(self) -> ParallelPlan: ...
    @property
    def trainer(self) -> TrainerConfig: ...


@runtime_checkable
class TrainingLimits(Protocol):
    """A training backend's class, or the light module of a built-in one."""

    @property
    def traits(self) -> TrainingTraits:
        """What it can do."""

    def check(self, config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
        """Raise ValueError for settings that it does not support, or has no effect for.

        config: a run's or a backend's settings.
        model: the model's Hugging Face configuration; None: it is not known yet.
        plan: the devices, without an open degree.
        """

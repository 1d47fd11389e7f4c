"""What a training backend says before it is imported, and how that is checked. Free of torch."""

from typing import Any, Protocol, runtime_checkable

from nemorl.checks import refuse_unused, require
from nemorl.parallel.config import LoRAConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traits import TrainingTraits

FOR_EXPERTS = ("router_replay", "router_aux_loss_coef")
"""Settings of the section trainer for mixtures of experts."""


@runtime_checkable
class TrainingSections(Protocol):
    """The settings that a check reads: sections of a run's or a backend's configuration."""

    @property
    def lora(self) -> LoRAConfig: ...
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


def check_training(
    config: TrainingSections, model: Any, plan: ParallelPlan, limits: TrainingLimits
) -> None:
    """Raise ValueError for settings, or a model on these devices, that a backend can't train.

    The arguments are the ones of `TrainingLimits.check`, which is called as well.
    """
    from nemorl.parallel.backends import able

    head, heads = getattr(config, "head", "lm"), limits.traits.heads
    requirement = f"must be {' or '.join(heads)} with trainer.backend {config.trainer.backend}"
    remedy = f"take --trainer.backend {able(lambda traits: head in traits.heads)}"
    require(head in heads, "head", requirement, head, remedy)
    if not limits.traits.experts:
        names = able(lambda traits: traits.experts)
        requirement, remedy = f"needs trainer.backend {names}", f"add --trainer.backend {names}"
        refuse_unused("trainer", config.trainer, requirement, remedy, names=FOR_EXPERTS)
    elif model is not None and not getattr(model, "num_local_experts", None):
        requirement = "is for models with experts"
        refuse_unused("trainer", config.trainer, requirement, "remove it", names=FOR_EXPERTS)
    limits.check(config, model, plan)
    sizes = ("num_attention_heads", "intermediate_size", "vocab_size")
    if all(hasattr(model, name) for name in sizes):
        plan.check(model, traits=limits.traits)

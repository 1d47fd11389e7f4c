"""What training backends say of themselves, by name, without importing them. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemorl.checks import checked_by
from nemorl.parallel.dtensor import limits as dtensor
from nemorl.parallel.limits import TrainingLimits, TrainingSections
from nemorl.parallel.megatron import limits as megatron
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.traits import TrainingTraits

LIMITS: dict[str, TrainingLimits] = {"dtensor": dtensor, "megatron": megatron}
"""Light modules of the built-in backends, and what registered classes say."""


@dataclass(frozen=True)
class OwnLimits:
    """What a registered class says, with defaults for what it does not say."""

    backend: type

    @property
    def traits(self) -> TrainingTraits:
        return getattr(self.backend, "traits", TrainingTraits())

    def check(self, config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
        check = getattr(self.backend, "check", None)
        if check is not None:
            with checked_by(f"training backend {self.backend.__name__}"):
                check(config, model, plan)


def able(does: Callable[[TrainingTraits], bool]) -> str:
    """Return the names of the training backends whose traits fulfil a condition, for advice.

    >>> able(lambda traits: traits.pipelines)
    'megatron'
    """
    return " or ".join(name for name, limits in LIMITS.items() if does(limits.traits))


def limits_of(name: str) -> TrainingLimits:
    """Return what a training backend says of itself; defaults for a name that is not registered.

    >>> limits_of("megatron").traits.needs_ranks, limits_of("dtensor").traits.needs_ranks
    (True, False)
    """
    return LIMITS.get(name) or OwnLimits(object)

"""What training backends say of themselves before they are imported, and checks by it. Free of
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from nemorl.checks import checked_by, refuse_unused, require
from nemorl.parallel.config import TrainingLimits, TrainingSections
from nemorl.parallel.dtensor import limits as dtensor
from nemorl.parallel.megatron import limits as megatron
from nemorl.parallel.plan import ParallelPlan, TrainingTraits, num_experts

FOR_EXPERTS = ("router_replay", "router_aux_loss_coef", "router_bias_update_rate")
LIMITS: dict[str, TrainingLimits] = {"dtensor": dtensor, "megatron": megatron}


@dataclass(frozen=True)
class OwnLimits:
    """What a registered class says, with defaults for what it does not say."""

    backend: type

    @property
    def traits(self) -> TrainingTraits:
        return getattr(self.backend, "traits", TrainingTraits())

    def check(self, config: TrainingSections, model: Any, plan: ParallelPlan) -> None:
        if check := getattr(self.backend, "check", None):
            with checked_by(f"training backend {self.backend.__name__}"):
                check(config, model, plan)


def able(does: Callable[[TrainingTraits], bool]) -> str:
    """Return the names of the training backends whose traits fulfil a condition, for advice.

    >>> able(lambda traits: traits.pipelines)
    'megatron'
    """
    return " or ".join(name for name, limits in LIMITS.items() if does(limits.traits))


def _able_to(setting: str) -> str:
    return able(lambda traits: setting in traits.experts)


def limits_of(name: str) -> TrainingLimits:
    """Return what a training backend says of itself; defaults for a name that is not registered.

    >>> limits_of("megatron").traits.needs_ranks, limits_of("dtensor").traits.needs_ranks
    (True, False)
    """
    return LIMITS.get(name) or OwnLimits(object)


def implements(name: str, method: str) -> bool:
    """Return whether a training backend has a method: the built-in ones have all of them.

    >>> implements("megatron", "offload"), implements("unknown", "offload")
    (True, False)
    """
    limits = limits_of(name)
    return not isinstance(limits, OwnLimits) or hasattr(limits.backend, method)


def check_training(
    config: TrainingSections, model: Any, plan: ParallelPlan, limits: TrainingLimits
) -> None:
    """Raise ValueError for settings, or a model on these devices, that a backend can't train."""
    missing = [name for name in limits.traits.packages if find_spec(name) is None]
    backend, packages = config.trainer.backend, " and ".join(missing)
    if missing:
        raise ValueError(
            f"trainer.backend {backend} must be installed, but {packages} can't be imported: pip"
            f" install {packages} (for megatron: pip install 'nemorl[megatron]')"
        )
    check_settings(config, model, plan, limits)
    sizes = ("num_attention_heads", "intermediate_size", "vocab_size")
    if all(hasattr(model, name) for name in sizes):
        plan.check(model, traits=limits.traits)


def check_settings(
    config: TrainingSections, model: Any, plan: ParallelPlan, limits: TrainingLimits
) -> None:
    """Raise ValueError as `check_training`, whatever is installed and whatever suits the model."""
    head, heads, rank = getattr(config, "head", "lm"), limits.traits.heads, config.lora.rank
    sharded = limits.traits.shards == "parameters"
    modules, overlaps = plan.recompute_modules, plan.overlap_grad_reduce
    heads_of = f"take --trainer.backend {able(lambda traits: head in traits.heads)}"
    other = "remove it, or take --trainer.backend dtensor"
    overlapped = "remove it: FSDP2 overlaps by itself"
    ranks = "parallel.dp_shard has more data parallel ranks, which share the optimizer's state"
    for field, value, fits, wanted, remedy in (
        ("head", head, head in heads, " or ".join(heads), heads_of),
        ("lora.rank", rank, limits.traits.adapters or not rank, 0, other),
        ("parallel.dp_replicate", plan.dp_replicate, sharded or plan.dp_replicate == 1, 1, ranks),
        ("parallel.recompute_modules", modules, not (sharded and modules), "empty", "remove it"),
        ("parallel.overlap_grad_reduce", overlaps, not (sharded and overlaps), "off", overlapped),
        ("parallel.cpu_offload", plan.cpu_offload, sharded or not plan.cpu_offload, "off", other),
    ):
        requirement = f"must be {wanted} with trainer.backend {config.trainer.backend}"
        require(fits, field, requirement, value, remedy)
    for name in sorted(set(FOR_EXPERTS) - set(limits.traits.experts)):
        names = _able_to(name)
        refuse_unused(
            "trainer",
            config.trainer,
            f"needs trainer.backend {names}",
            f"add --trainer.backend {names}",
            names=[name],
        )
    if model is not None and not num_experts(model):
        refuse_unused(
            "trainer",
            config.trainer,
            "is for models with experts",
            "remove it",
            names=FOR_EXPERTS,
        )
    limits.check(config, model, plan)

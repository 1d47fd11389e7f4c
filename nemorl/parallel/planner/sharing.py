"""The share of a GPU for an engine that takes turns with a trainer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nemorl.checks import require
from nemorl.parallel.planner.megatron import PlannedStage
from nemorl.parallel.planner.memory import Memory, PlannedStep, engine_memory

GB = 1e9


def engine_share(card: float, *, kept: float, needed: float, reserve: float = 0.1) -> float:
    """Return an engine's share of a GPU of `card` bytes, beside the `kept` bytes of a trainer:
    vLLM's gpu_memory_utilization, in thousandths.

    Raises: ValueError where less is left than needed to start.

    >>> engine_share(80e9, kept=20e9, needed=17e9)
    0.65
    """
    left = card * (1 - reserve) - kept
    require(
        left >= needed,
        "generation.colocated",
        f"must be false where an engine needs {needed / GB:.1f} GB (weights, a sequence's cache,"
        f" activations) and the {kept / GB:.1f} GB that the trainer keeps leave"
        f" {max(left, 0) / GB:.1f} GB of the GPU's {card / GB:.1f} GB",
        True,
        "add --trainer.offload-during-generation if it is off, a larger"
        " --generation.tensor-parallel-size, --generation.no-colocated or more devices",
    )
    return math.floor(1000 * left / card) / 1000


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a trainer and engines share a GPU, in bytes."""

    card: float
    resident: int
    """What the trainer would keep without offloading."""
    wanted: int
    """What an engine takes with a cache for a batch, of 64 sequences at most."""
    training: int
    """The peak of training."""
    kept: int
    """What the trainer keeps while engines generate."""
    offloads: bool
    chosen: bool
    """Whether nemorl chose so."""
    fits: bool
    share: float
    """The engine's gpu_memory_utilization."""

    def __str__(self) -> str:
        said = (
            f"engines get {self.share:g} of each GPU's {self.card / GB:.1f} GB"
            f" (gpu_memory_utilization) beside {self.kept / GB:.1f} GB of the trainer's; training"
            f" takes {self.training / GB:.1f} GB at its peak"
        )
        if not self.chosen:
            return said
        both = f"trainer's {self.resident / GB:.1f} GB and an engine's {self.wanted / GB:.1f} GB"
        on, fit = "on" if self.offloads else "off", "fit" if self.fits else "don't fit"
        return f"{said}; trainer.offload_during_generation is {on}: the {both} {fit} together"


def stages_of(step: PlannedStep) -> Sequence[PlannedStep | PlannedStage]:
    """Return a pipeline's stages, or the step alone."""
    if not step.shards_optimizer:
        return [step]
    parts, pp = step.plan.stages.layers(step.model.num_hidden_layers), step.plan.pp
    return [PlannedStage(step, index, sum(map(len, parts[index::pp]))) for index in range(pp)]


def devices_of(step: PlannedStep) -> Iterator[tuple[PlannedStep | PlannedStage, ...]]:
    """Yield each stage's parts of all models."""
    return zip(*map(stages_of, step.models.values()), strict=True)


def states_of(step: PlannedStep) -> Memory:
    """Return what the fullest stage keeps from step to step, of all models."""
    kept = (sum((part.states() for part in parts), Memory()) for parts in devices_of(step))
    return max(kept, key=lambda kept: kept.total)


def moments_of(step: PlannedStep) -> Iterator[Memory]:
    """Yield each part's fullest moment, beside what other models keep."""
    for parts in devices_of(step):
        for part in parts:
            yield sum((x.states() for x in parts if x is not part), part.training_memory())


def training_of(step: PlannedStep) -> int:
    """Return the peak bytes of training, of the fullest stage."""
    return max(moment.total for moment in moments_of(step))


def cache_of(step: PlannedStep, *, can_empty: bool) -> int:
    """Return what PyTorch's allocator keeps after a step, in bytes."""
    states = states_of(step)
    return 0 if can_empty else max(0, training_of(step) - states.total + states.gradients)


def host_of(step: PlannedStep) -> int:
    """Return the bytes that a process moves to main memory."""
    if step.plan.cpu_offload:
        return states_of(replace(step, plan=replace(step.plan, cpu_offload=False))).total
    if not step.work.trainer.offload_during_generation:
        return 0
    states = states_of(step)
    return states.total - states.gradients


def check_states(step: PlannedStep, card: float) -> None:
    """Refuse a plan whose parameters, gradients and optimizer exceed a GPU's bytes."""
    least = states_of(step).total
    require(
        least <= card,
        "parallel",
        f"must spread parameters, gradients and optimizer over GPUs that hold them: each would keep"
        f" {least / GB:.1f} GB of its {card / GB:.1f} GB",
        step.plan.num_ranks,
        smaller(step),
    )


def smaller(step: PlannedStep) -> str:
    """Return the settings that let a step take less of each GPU."""
    if step.shards_optimizer:
        return "take more devices (--parallel.tp or --parallel.pp)"
    others = "--lora.rank 16, " * (not step.work.lora.rank)
    others += "--parallel.cpu-offload, " * (not step.plan.cpu_offload)
    return f"add {others}{'or ' * bool(others)}more devices (--parallel.dp-shard)"


def sharing(
    step: PlannedStep,
    *,
    card: float,
    can_offload: bool,
    can_empty: bool,
    given: float | None = None,
    sleeps: bool = True,
) -> Sharing:
    """Return how engines share GPUs with a trainer.

    card: bytes of a GPU. given: the engine's share by the user.
    can_offload, can_empty: whether the training backend has `offload`, and `empty_cache`.
    sleeps: whether engines give their memory back while the model trains.
    Raises: ValueError where both, or the trainer alone, do not fit.
    """
    work, states, training = step.work, states_of(step), training_of(step)
    asked = work.trainer.offload_during_generation

    def kept(offloads: bool) -> int:
        if not sleeps:
            return training
        cache = cache_of(step, can_empty=can_empty)
        return with_offloading(step, offloads).generation_memory(states, cache=cache).total

    check_states(step, card)
    resident, wanted = kept(False), engine_memory(step, min(work.generation.max_batch_size, 64))
    if given is not None:
        wanted = int(given * card)
    fits = resident + wanted <= card * (1 - work.reserve)
    offloads = (can_offload and sleeps and not fits) if asked is None else asked
    left, share = kept(offloads), given
    if share is None:
        share = engine_share(card, kept=left, needed=engine_memory(step, 1), reserve=work.reserve)
    return Sharing(
        card=card,
        resident=resident,
        wanted=wanted,
        training=training,
        kept=left,
        offloads=offloads,
        chosen=asked is None,
        fits=fits,
        share=share,
    )


def with_offloading(step: PlannedStep, offloads: bool) -> PlannedStep:
    """Return the step with or without offloading during generation."""
    trainer = replace(step.work.trainer, offload_during_generation=offloads)
    return replace(step, work=replace(step.work, trainer=trainer))

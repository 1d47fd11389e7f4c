"""How a run's trainer and engines share GPUs, found before the trainer is loaded."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from nemorl.parallel.config import MICRO_BATCH_TOKENS
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.parallel.planner.sharing import GB, Sharing, sharing, training_of
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.start.devices import Devices
from nemorl.warn import warn


def sharing_of(
    config: BaseConfig,
    devices: Devices,
    engines: GenerationConfig | None,
    model: Any,
    *,
    card: float | None,
    can_offload: bool,
    can_empty: bool,
) -> Sharing | None:
    """Return how engines share the GPUs of the ranks; None where they don't, or sizes are unknown.

    card: bytes of the smallest GPU. can_offload, can_empty: methods of the training backend.
    Raises: ValueError where engines have too little memory.
    """
    if engines is None or not devices.shares_gpus(engines) or model is None:
        return None
    shape = None
    with suppress(ValueError):
        shape = model_shape(model)
    if shape is None or card is None:
        unknown = getattr(model, "model_type", "the model") if shape is None else "the GPUs"
        if "gpu_memory_utilization" not in engines.engine:
            warn(
                f"the sizes of {unknown} are not known, so engines on the trainer's GPUs take"
                " vLLM's own share of them: if memory runs out, set --generation.engine"
                """ '{"gpu_memory_utilization": 0.4}'"""
            )
        return None
    step = Step(shape, devices.plan, workload(config, devices, engines))
    room = card * (1 - step.work.reserve)
    if not devices.torchrun:  # where machines may have other GPUs, and all must cut alike
        step = with_room(step, room, longest=config.data.max_total_sequence_length)
    can_offload &= step.can_offload
    given = engines.engine.get("gpu_memory_utilization")
    sleeps = engines.sleep_level != 0
    able = {"can_offload": can_offload, "can_empty": can_empty}
    found = sharing(step, card=card, **able, given=given, sleeps=sleeps)
    if found.training > room:
        warn(
            f"training is estimated to take {found.training / GB:.1f} of each GPU's"
            f" {card / GB:.1f} GB, beside what a sleeping engine keeps: if memory runs out, lower"
            " --trainer.micro-batch-tokens or add --parallel.activation-checkpointing full"
        )
    return found


def with_room(step: Step, room: float, *, longest: int) -> Step:
    """Return a step with the largest default microbatch for which training has room."""
    trainer = step.work.trainer
    if trainer.micro_batch_tokens or trainer.train_micro_batch_size:
        return step
    tokens = max(MICRO_BATCH_TOKENS, longest)
    while True:
        sized = replace(trainer, micro_batch_tokens=tokens)
        tried = replace(step, work=replace(step.work, trainer=sized))
        if tokens == longest or training_of(tried) <= room:
            return tried
        tokens = max(longest, tokens // 2)


def workload(config: BaseConfig, devices: Devices, engines: GenerationConfig) -> PlanConfig:
    """Return a run's settings as `nemorl plan` has them."""
    sections = {name: getattr(config, name) for name in ("trainer", "optimizer", "lora")}
    sections["generation"] = engines
    return PlanConfig(
        gpus=devices.plan.num_ranks * engines.devices_per_replica,
        seq_len=engines.max_model_len or config.data.max_total_sequence_length,
        keep_reference=keeps_reference(config),
        **{name: _without(given, PlanConfig.unused[name]) for name, given in sections.items()},
    )


def keeps_reference(config: BaseConfig) -> bool:
    """Return whether the trainer keeps the initial model."""
    needed = getattr(config, "needs_reference", False)
    return needed and getattr(config, "reference", "live") == "live"


def _without(section: Any, names: tuple[str, ...]) -> Any:
    usual = type(section)()
    return replace(section, **{name: getattr(usual, name) for name in names})

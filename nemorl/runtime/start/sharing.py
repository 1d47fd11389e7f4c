"""Whether a run fits into its GPUs, and how trainer and engines share them, found before the model
is loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nemorl.models.capabilities import ASSUMED, known
from nemorl.parallel.backends import OwnLimits, limits_of
from nemorl.parallel.config import MICRO_BATCH_TOKENS
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import Step
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.parallel.planner.sharing import (
    GB,
    Sharing,
    check_states,
    sharing,
    smaller,
    training_of,
)
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.start.devices import Devices
from nemorl.warn import warn

LARGE_CHUNK = 4096
"""`trainer.logprob_chunk` where there is room: fewer times is the head's gradient added to."""


@dataclass(frozen=True)
class Fit:
    """A run's step on GPUs of `card` bytes, with what was chosen so that training fits."""

    step: Step
    card: float
    micro_batch_tokens: int | None = None
    """trainer.micro_batch_tokens, if it is not left open."""

    def __str__(self) -> str:
        tokens = self.step.work.trainer.micro_batch_tokens
        sized = f" and microbatches of at most {tokens} tokens" * (tokens is not None)
        chunk = self.step.work.trainer.chunk
        chunked = f" and logits of {chunk} tokens at a time" * (chunk == LARGE_CHUNK)
        return (
            f"training is estimated to take {training_of(self.step) / GB:.1f} of each GPU's"
            f" {self.card / GB:.1f} GB, with parallel.activation_checkpointing"
            f" {self.step.plan.recomputes}{sized}{chunked}"
        )


def fitted(
    config: BaseConfig,
    devices: Devices,
    engines: GenerationConfig | None,
    model: Any,
    *,
    card: float | None,
) -> Fit | None:
    """Return a run's step with the largest default microbatch, and the least recomputation, with
    which training fits; None where sizes are unknown. What the user set stays.

    engines: those on the ranks' GPUs. card: bytes of the smallest GPU.
    Raises: ValueError where training needs more than a GPU has, and the user set nothing of it.
    """
    registered, shape = isinstance(limits_of(config.trainer.backend), OwnLimits), None
    with suppress(Exception):  # transformers raises what a wrong value leads to
        shape = None if model is None else model_shape(model)
    if shape is None or card is None or (registered and engines is None):
        return None
    step = Step(shape, devices.plan, workload(config, devices, engines))
    check_states(step, card)
    room, trainer = card * (1 - step.work.reserve), step.work.trainer
    longest = max(config.longest_row, trainer.packed_row_tokens or 0)
    large = not (trainer.logprob_chunk or engines or devices.torchrun)
    tries = [*_tries(step, model, longest, chunks=[LARGE_CHUNK, None] if large else [None])]
    if devices.torchrun:  # where machines may have other GPUs, and all must cut alike
        tries = tries[:1]
    found = next((each for each in tries if training_of(each) <= room), tries[-1])
    given, chosen = trainer.micro_batch_tokens, found.work.trainer.micro_batch_tokens
    usual = max(MICRO_BATCH_TOKENS, longest)
    fit = Fit(found, card, chosen if given or chosen != usual else None)
    if (taken := training_of(found)) <= room:
        return fit
    own = given or trainer.train_micro_batch_size or step.plan.activation_checkpointing
    if taken <= card or own or devices.torchrun:
        warn(
            f"{fit}: if memory runs out, lower --trainer.micro-batch-tokens or add"
            " --parallel.activation-checkpointing full"
        )
        return fit
    raise ValueError(
        f"parallel must spread the model over GPUs that can train it, but {fit}, the least that can"
        f" be chosen: {smaller(step)}; or lower --data.max-total-sequence-length, or try it"
        f" nevertheless with --trainer.micro-batch-tokens {longest}"
    )


def _tries(step: Step, model: Any, longest: int, *, chunks: Sequence[int | None]) -> Iterator[Step]:
    """Yield a step with what may be chosen, the fastest first."""
    trainer, plans, tokens = step.work.trainer, [step.plan], MICRO_BATCH_TOKENS
    proofs = known(model) if limits_of(trainer.backend).traits.proves else ASSUMED
    if not step.plan.activation_checkpointing and proofs and proofs["recompute"].holds:
        plans.append(replace(step.plan, activation_checkpointing="full"))
    sizes = [max(tokens, longest)]
    while sizes[-1] > longest:
        sizes.append(max(longest, sizes[-1] // 2))
    given = trainer.micro_batch_tokens or trainer.train_micro_batch_size
    for plan in plans:
        for size in [trainer.micro_batch_tokens] if given else sizes:
            for chunk in chunks:
                logits = chunk or trainer.logprob_chunk
                chosen = replace(trainer, micro_batch_tokens=size, logprob_chunk=logits)
                yield replace(step, plan=plan, work=replace(step.work, trainer=chosen))


def sharing_of(
    fit: Fit | None,
    engines: GenerationConfig,
    model: Any,
    *,
    can_offload: bool,
    can_empty: bool,
) -> Sharing | None:
    """Return how engines share the GPUs of the ranks; None where sizes are unknown.

    can_offload, can_empty: methods of the training backend.
    Raises: ValueError where engines have too little memory.
    """
    given = engines.engine.get("gpu_memory_utilization")
    if fit is not None:
        return sharing(
            fit.step,
            card=fit.card,
            can_offload=can_offload and fit.step.can_offload,
            can_empty=can_empty,
            given=given,
            sleeps=engines.sleep_level != 0,
        )
    if model is not None and given is None:
        kind = getattr(model, "model_type", "the model")
        warn(
            f"the sizes of {kind} or of the GPUs are not known, so engines on the trainer's GPUs"
            " take vLLM's own share of them: if memory runs out, set"
            """ --generation.engine '{"gpu_memory_utilization": 0.4}'"""
        )
    return None


def workload(config: BaseConfig, devices: Devices, engines: GenerationConfig | None) -> PlanConfig:
    """Return a run's settings as `nemorl plan` has them."""
    sections = {name: getattr(config, name) for name in ("trainer", "optimizer", "lora")}
    engines = sections["generation"] = engines or GenerationConfig()
    return PlanConfig(
        gpus=devices.plan.num_ranks * engines.devices_per_replica,
        seq_len=engines.max_model_len or config.longest_row,
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

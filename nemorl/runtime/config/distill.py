"""The settings of distillation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from nemorl.checks import at_least, refuse_unused, require
from nemorl.runtime.config.grpo import (
    AdvantageConfig,
    GroupAdvantage,
    OnlineConfig,
    check_groups,
    require_token_loss,
)

LIVE = "self"
SAMPLING = (
    *("loss", "advantage", "reward_coef", "kl", "off_policy", "overlong", "gap", "async_"),
    *("receipts", "rollout", "num_generations_per_prompt", "entropy_coef"),
)
"""Unused where the data have the responses."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The model that scores tokens."""

    model: str | dict[str, str] | None = None
    """A folder, hub name, run, or URL of vLLM's server (http://host:8000/v1#MODEL); self: the
    student at each step; default: as it began. Of a mapping the rows' column `teacher` chooses.
    """
    engine: str | None = None
    """Generation backend that scores, such as vllm, with the settings of `generation`. Default: a
    training backend.
    """
    own_devices: bool = False
    """Give it devices of its own, not the student's in turns."""

    def __post_init__(self) -> None:
        for each in self.models.values() if self.engine or self.own_devices else ():
            require(
                each not in (None, LIVE) and not each.startswith("http"),
                "teacher.model",
                "must be a folder for teacher.engine and teacher.own_devices",
                each,
                "name one, or remove these",
            )

    @property
    def models(self) -> Mapping[str, str | None]:
        """The teachers by name; a single one has none."""
        return self.model if isinstance(self.model, Mapping) else {"": self.model}


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Policy gradient with the advantage log π_teacher - log π of each sampled token."""

    name: Literal["sampled"] = "sampled"
    coef: float = 1.0
    """Weight beside the advantages of rewards."""

    def __post_init__(self) -> None:
        at_least(0, distillation__coef=self.coef)


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """Divergence of both distributions at the teacher's likeliest tokens."""

    name: Literal["top_k"] = "top_k"
    top_k: int | None = 64
    """How many of the teacher's likeliest tokens are compared. None: all."""
    direction: Literal["forward", "reverse", "mixed", "jensen_shannon"] = "reverse"
    """forward: KL(teacher‖student), covers all that the teacher says; reverse: KL(student‖teacher),
    avoids what it does not; mixed, jensen_shannon: between them.
    """
    mix: float = 0.5
    """Share of forward in mixed; the teacher's weight in jensen_shannon."""
    outside: Literal["rest_mass", "renormalize", "zero"] = "rest_mass"
    """All other tokens: one more outcome, left out of both, or impossible for the teacher."""
    coef: float = 1.0
    """Weight beside the policy loss."""

    def __post_init__(self) -> None:
        at_least(1, distillation__top_k=self.top_k)
        at_least(0, distillation__coef=self.coef)
        inside = 0 < self.mix < 1 or (self.mix in (0, 1) and self.direction == "mixed")
        require(inside, "distillation.mix", "must lie in 0 … 1", self.mix, "0.5 is the middle")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(OnlineConfig):
    """Learning from a teacher, which scores the student's tokens."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distillation: Annotated[SampledTokens | TopTokens, Field(discriminator="name")] = field(
        default_factory=SampledTokens
    )
    on_policy: bool = True
    """Learn on the student's responses; else on those of data.train, as for sft."""
    reward_coef: float = 0.0
    """Weight of the advantages of rewards. 0: rewards are only measured."""
    advantage: AdvantageConfig = field(default_factory=GroupAdvantage)
    num_generations_per_prompt: int = 1
    """Responses per prompt: the group size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, reward_coef=self.reward_coef)
        refuse_unused(
            "generation",
            self.generation,
            "must be off, as all tokens are compared",
            "remove it",
            names=("top_k", "top_p", "min_p"),
        )
        require(
            self.off_policy.proximal == "recompute",
            "off_policy.proximal",
            "must be recompute for distill",
            self.off_policy.proximal,
            "remove it",
        )
        if not self.on_policy:
            refuse_unused(
                "",
                self,
                "has no use without on_policy, where nothing is sampled",
                "remove it",
                names=SAMPLING,
            )
            require(
                isinstance(self.distillation, TopTokens),
                "distillation",
                "must be top_k without on_policy",
                self.distillation.name,
                "add --distillation top_k",
            )
        if isinstance(self.distillation, SampledTokens):
            require_token_loss(self, "distillation sampled")
        if self.reward_coef:
            check_groups(self)
        else:
            refuse_unused("", self, "needs reward_coef above 0", "set it", names=["advantage"])

    def generates(self, *, answers: bool) -> bool:
        return self.on_policy or answers

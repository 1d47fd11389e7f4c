"""The settings of PPO."""

from dataclasses import dataclass, field
from typing import Literal

from nemorl.checks import at_least, refuse_unused, require
from nemorl.runtime.config.grpo import OnlineConfig, require_token_loss


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The model that predicts rewards."""

    model: str | None = None
    """Folder or hub name of a model or a reward model. None: the policy, as it began."""
    own_ranks: bool = False
    """Have Ray place as many ranks for it as the policy has."""
    lr: float = 1e-5
    """Peak learning rate; all else is as in optimizer."""
    warmup_steps: int = 0
    """First steps, in which the critic alone trains."""
    clip: float | None = 0.2
    """An update gains nothing by moving a value further, in the reward's unit. None: no limit."""

    def __post_init__(self) -> None:
        at_least(0, critic__warmup_steps=self.warmup_steps)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            fits = value is None or value > 0
            require(fits, f"critic.{name}", "must be positive", value, "omit it for the default")


@dataclass(frozen=True, kw_only=True)
class GAEAdvantage:
    """Generalized advantage estimation."""

    gamma: float = 1.0
    """Discount of rewards per token."""
    lam: float = 0.95
    """λ, from 0 (trust the value of the next token) to 1 (trust the rewards)."""
    value_lam: float | None = None
    """λ of what values are trained on (VAPO: 1). None: as for the policy."""
    length_alpha: float | None = None
    """α of λ = 1 - 1/(α · length) in place of lam (VAPO: 0.05)."""
    kl_coef: float = 0.0
    """Weight of the penalty log π_prev - log π_ref per token. Above 0, a reference is kept."""
    whiten: bool = True
    """Shift and scale a rollout batch's advantages to mean 0 and deviation 1."""

    def __post_init__(self) -> None:
        at_least(0, advantage__kl_coef=self.kl_coef)
        for name in ("gamma", "lam", "value_lam"):
            value = getattr(self, name)
            fits = value is None or 0 <= value <= 1
            require(fits, f"advantage.{name}", "must lie in 0 … 1", value, "0.95 to 1 is usual")
        if (alpha := self.length_alpha) is not None:
            require(alpha > 0, "advantage.length_alpha", "must be above 0", alpha, "try 0.05")
            refuse_unused(
                "advantage",
                self,
                "can't be given together with advantage.length_alpha",
                "remove one",
                names=["lam"],
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """Reinforcement learning with a critic, a second model that learns to predict rewards."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    advantage: GAEAdvantage = field(default_factory=GAEAdvantage)
    # No response needs others of its prompt, so more prompts teach more.
    num_prompts_per_step: int = 256
    num_generations_per_prompt: int = 1
    reduction: Literal["token_mean", "sequence_mean", "constant", "group_mean"] = "token_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token_loss(self, "a critic")
        require(
            self.critic.warmup_steps < self.max_num_steps,
            "critic.warmup_steps",
            f"must be below max_num_steps ({self.max_num_steps})",
            self.critic.warmup_steps,
            "leave steps for the policy",
        )
        require(
            not (self.kl.coef and self.advantage.kl_coef),
            "kl.coef",
            "must be 0 with advantage.kl_coef above 0",
            self.kl.coef,
            "penalize in one place",
        )

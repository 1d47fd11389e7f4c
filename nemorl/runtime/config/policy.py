"""Sections of GRPO: policy loss, advantage, KL penalty, off-policy correction, overlong responses,
and the gap between sampler and trainer.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from nemorl.checks import at_least, require


def check_clip(low: float, high: float) -> None:
    """Raise ValueError unless [1 - low, 1 + high] is an interval for a ratio."""
    require(0 <= low <= 1, "loss.clip_low", "must lie in 0 … 1", low, "0.2 clips the ratio at 0.8")
    require(high >= 0, "loss.clip_high", "must be at least 0", high, "0.2 clips the ratio at 1.2")


@dataclass(frozen=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped surrogate, token by token (GRPO, DAPO, Dr. GRPO)."""

    name: Literal["clipped"] = "clipped"
    clip_low: float = 0.2
    """Lower clip of the ratio: it is at least 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the ratio: it is at most 1 + clip_high (0.28 in DAPO's clip-higher)."""
    dual_clip: float | None = None
    """Bound of the loss where the advantage is negative, as a multiple of it (3 is usual)."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            "loss.dual_clip",
            "must be above 1 or None",
            self.dual_clip,
            "3 is usual",
        )


@dataclass(frozen=True, kw_only=True)
class GSPOLoss:
    """The clipped surrogate of the whole sequence's ratio (GSPO)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = 3e-4
    """Lower clip of the sequence ratio: it is at least 1 - clip_low."""
    clip_high: float = 4e-4
    """Upper clip of the sequence ratio: it is at most 1 + clip_high."""
    token_gradient: bool = False
    """Use GSPO-token: the same value, with a gradient per token."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class CISPOLoss:
    """REINFORCE weighted by the clipped, stopped ratio (MiniMax-M1)."""

    name: Literal["cispo"] = "cispo"
    clip_low: float | None = None
    """Lower clip of the ratio at 1 - clip_low. None: no lower bound, as in MiniMax-M1."""
    clip_high: float = 4.0
    """Upper clip of the ratio at 1 + clip_high."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low or 0.0, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss:
    """Plain REINFORCE: -A · log π (RLOO)."""

    name: Literal["reinforce"] = "reinforce"


PolicyLossConfig = Annotated[
    ClippedLoss | GSPOLoss | CISPOLoss | ReinforceLoss, Field(discriminator="name")
]


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """(reward - baseline) / scale within the responses to one prompt."""

    name: Literal["group"] = "group"
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none", "length_weighted"] = (
        "group_mean"
    )
    """Baseline subtracted from a reward."""
    scale: Literal["group_std", "leave_one_out_std", "batch_std", "none"] = "group_std"
    """Divisor of the difference."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off a standard deviation: divide by n - 1 (1) or n (0)."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantage:
    """REINFORCE++: reward minus a per-token KL penalty, whitened over the batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_coef: float = 0.0
    """Weight of the per-token penalty log π_prev - log π_ref in the reward. Above 0, a reference
    model is kept.
    """
    group_baseline: bool = False
    """Subtract the group's mean reward first (REINFORCE++-baseline)."""

    def __post_init__(self) -> None:
        at_least(0, advantage__kl_coef=self.kl_coef)


AdvantageConfig = Annotated[
    GroupAdvantage | ReinforcePlusPlusAdvantage, Field(discriminator="name")
]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Penalty for leaving the reference model, added to the loss."""

    coef: float = 0.0
    """Weight of the penalty. Above 0, a frozen copy of the initial model is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of KL(π‖π_ref)."""
    gradient: Literal["pathwise", "score", "importance"] = "pathwise"
    """Gradient of the penalty: of the estimate alone, with the score-function term, or weighted by
    π/π_gen.
    """

    def __post_init__(self) -> None:
        at_least(0, kl__coef=self.coef)


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Correction for the gap between sampler and trainer, by weights w = π_prev/π_gen."""

    mode: Literal["none", "truncate", "mask", "sequence_mask"] = "none"
    """Use of w. truncate: clamp it (TIS); mask: drop tokens with w outside the bounds (IcePop);
    sequence_mask: drop whole sequences.
    """
    level: Literal["token", "sequence", "geometric"] = "token"
    """Level of w: of each token, of the sequence (product), or its geometric mean."""
    min: float = 0.0
    """Lower bound of w."""
    max: float = 2.0
    """Upper bound of w."""

    def __post_init__(self) -> None:
        require(
            0 <= self.min < self.max,
            "off_policy.min",
            "must be at least 0 and below off_policy.max",
            self.min,
            f"off_policy.max is {self.max}",
        )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Treatment of responses that reach generation.max_new_tokens (DAPO)."""

    buffer: float = 0.0
    """Last share of the limit, over which the reward falls linearly by up to `penalty` (0.2 in
    DAPO). 0: no shaping.
    """
    penalty: float = 1.0
    """Reward that a response at the limit loses."""
    filter: bool = False
    """Exclude responses that were cut off at the limit from the loss."""

    def __post_init__(self) -> None:
        at_least(0, overlong__penalty=self.penalty)
        require(
            0 <= self.buffer <= 1,
            "overlong.buffer",
            "must lie in 0 … 1",
            self.buffer,
            "it is a share of generation.max_new_tokens; DAPO's is 0.2",
        )


@dataclass(frozen=True, kw_only=True)
class GapConfig:
    """Limits on the gap between sampler and trainer for the same tokens and weights.

    Its measure is token_mult_prob_error of a step: the mean of exp |log π_trainer - log π_sampler|,
    1 if they agree.
    """

    warn: float | None = 1.05
    """Gap from which to warn, and again whenever the excess over 1 has doubled. null: never."""
    stop: float | None = None
    """Gap that ends the run with an error after its step. null: never."""

    def __post_init__(self) -> None:
        for name, bound in (("warn", self.warn), ("stop", self.stop)):
            require(
                bound is None or bound > 1,
                f"gap.{name}",
                "must be above 1 or None",
                bound,
                "1 is agreement; 1.05 is 5 % off on average",
            )

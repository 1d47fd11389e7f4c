"""The settings of GRPO and its relatives, and presets of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from nemorl.checks import at_least, refuse_unused, require
from nemorl.rollout.config import RolloutConfig
from nemorl.runtime.config.base import BaseConfig, RewardConfig
from nemorl.runtime.config.spellings import algorithm_hint
from nemorl.runtime.config.tree import OwnFunction, construct, layer


def _check_clip(low: float, high: float) -> None:
    require(0 <= low <= 1, "loss.clip_low", "must lie in 0 … 1", low, "0.2 clips the ratio at 0.8")
    require(high >= 0, "loss.clip_high", "must be at least 0", high, "0.2 clips the ratio at 1.2")


@dataclass(frozen=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped surrogate, token by token (GRPO, DAPO, Dr. GRPO)."""

    name: Literal["clipped"] = "clipped"
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high (0.28 in DAPO's clip-higher)."""
    dual_clip: float | None = None
    """For negative advantages, the loss is at most dual_clip · |advantage| (3 is usual)."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
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
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence's ratio is clipped above 1 + clip_high."""
    token_gradient: bool = False
    """Use GSPO-token: the same value, with a gradient per token."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class CISPOLoss:
    """REINFORCE weighted by the clipped, stopped ratio (MiniMax-M1)."""

    name: Literal["cispo"] = "cispo"
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low. None: no lower bound, as in MiniMax-M1."""
    clip_high: float = 4.0
    """The ratio is clipped above 1 + clip_high."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low or 0.0, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class SAPOLoss:
    """A soft gate in place of the clip (SAPO)."""

    name: Literal["sapo"] = "sapo"
    temperature_positive: float = 1.0
    """How fast the gradient fades off ratio 1, for positive advantages."""
    temperature_negative: float = 1.05
    """The same for others."""

    def __post_init__(self) -> None:
        at_least(1e-3, loss__temperature_positive=self.temperature_positive)
        at_least(1e-3, loss__temperature_negative=self.temperature_negative)


@dataclass(frozen=True, kw_only=True)
class GMPOLoss:
    """The geometric mean of a sequence's clipped ratios (GMPO)."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = 0.4
    """A token's log ratio is clipped below -clip_low."""
    clip_high: float = 0.4
    """A token's log ratio is clipped above clip_high."""

    def __post_init__(self) -> None:
        at_least(0, loss__clip_low=self.clip_low, loss__clip_high=self.clip_high)


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss:
    """Plain REINFORCE: -A · log π (RLOO)."""

    name: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True, kw_only=True)
class OwnLoss(OwnFunction):
    """A loss of your own: fn(token_logprobs, prev_logprobs, advantages, loss_weights, *, settings)
    -> loss, in a module or a file (./my_file.py:fn).
    """

    data = ("token_logprobs", "prev_logprobs", "advantages", "loss_weights")
    extra = ("importance_weights", "segment_ids")


PolicyLossConfig = Annotated[
    ClippedLoss | GSPOLoss | CISPOLoss | SAPOLoss | GMPOLoss | ReinforceLoss | OwnLoss,
    Field(discriminator="name"),
]


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """(reward - baseline) / scale within the responses to one prompt."""

    name: Literal["group"] = "group"
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none", "length_weighted"] = (
        "group_mean"
    )
    """Subtracted from a reward."""
    scale: Literal["group_std", "leave_one_out_std", "group_mean", "batch_std", "none"] = (
        "group_std"
    )
    """Divisor of the difference (group_mean: MaxRL)."""
    ddof: Literal[0, 1] = 1
    """A standard deviation divides by n - ddof."""
    level: Literal["conversation", "turn"] = "conversation"
    """Compare rewards of whole conversations, or with the same turn of the group's others each
    turn's discounted sum of its reward and later ones.
    """


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantage:
    """REINFORCE++: reward minus a per-token KL penalty, whitened over the batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_coef: float = 0.0
    """Weight of the penalty log π_prev - log π_ref per token. Above 0, a reference is kept."""
    group_baseline: bool = False
    """Subtract the group's mean reward first (REINFORCE++-baseline)."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by n - ddof; NeMo RL's by n."""

    def __post_init__(self) -> None:
        at_least(0, advantage__kl_coef=self.kl_coef)


@dataclass(frozen=True, kw_only=True)
class PassAtKAdvantage:
    """What a response adds to the best reward of k."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = 4
    """Responses of which the best counts."""

    def __post_init__(self) -> None:
        at_least(1, advantage__k=self.k)


@dataclass(frozen=True, kw_only=True)
class OwnAdvantage(OwnFunction):
    """Advantages of your own: fn(rewards, group_id, *, settings) -> one per response or token, in a
    module or a file (./my_file.py:fn).
    """

    data = ("rewards", "group_id")
    extra = ("lengths", "loss_mask")


AdvantageConfig = Annotated[
    GroupAdvantage | ReinforcePlusPlusAdvantage | PassAtKAdvantage | OwnAdvantage,
    Field(discriminator="name"),
]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Penalty for leaving the reference model, added to the loss."""

    coef: float = 0.0
    """Weight of the penalty. Above 0, a frozen copy of the initial model is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of KL(π‖π_ref)."""
    gradient: Literal["pathwise", "score", "importance"] = "pathwise"
    """Gradient: of the estimate alone, with the score-function term, or weighted by π/π_gen."""

    def __post_init__(self) -> None:
        at_least(0, kl__coef=self.coef)


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Correction for the gap between sampler and trainer, and for samples of older weights, by
    w = π_prev/π_gen, the trainer's probability over the sampler's.
    """

    mode: Literal["auto", "none", "truncate", "mask", "sequence_mask"] = "auto"
    """truncate: clamp w (TIS); mask: drop tokens with w outside the bounds (IcePop);
    sequence_mask: drop whole sequences. auto: truncate where async.max_staleness is 1 or more, else
    none.
    """
    level: Literal["token", "sequence", "geometric"] = "token"
    """w of each token, of the sequence (product), or its geometric mean."""
    min: float = 0.0
    """Lower bound of w."""
    max: float = 2.0
    """Upper bound of w."""
    token_bounds: tuple[float, float] | None = None
    """Drop also tokens whose own ratio is outside (low, high)."""
    extreme_bounds: tuple[float, float] | None = None
    """Drop also sequences of which any token's ratio is outside."""
    geometric_bounds: tuple[float, float] | None = None
    """Drop also sequences whose ratio's geometric mean is outside."""
    probability_bounds: tuple[float, float] | None = None
    """Drop also tokens whose probability is more than the first below the sampler's, or more than
    the second above it (prime-rl: 0.2 and 0.2), where the advantage moves them further away.
    """
    binary_kl_bounds: tuple[float, float] | None = None
    """Likewise by the KL of "this token or another" from sampler to trainer (DPPO)."""
    mean_binary_kl: float | None = None
    """Drop also sequences whose mean of it is above (FlashREINFORCE: 0.003)."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """π_prev with several updates per batch: computed before the first, or, to save that pass,
    estimated between π_gen and π from the tokens' versions (AReaL's loglinear).
    """
    penalty: float = 0.0
    """Weight of the penalty (log π - log π_gen)² (prime-rl: 0.001)."""

    def __post_init__(self) -> None:
        at_least(
            0, off_policy__penalty=self.penalty, off_policy__mean_binary_kl=self.mean_binary_kl
        )
        for name in ("token_bounds", "extreme_bounds", "geometric_bounds"):
            bounds = getattr(self, name)
            require(
                bounds is None or 0 <= bounds[0] < bounds[1],
                f"off_policy.{name}",
                "must be two numbers, the first at least 0 and below the second",
                bounds,
                "0.5 and 2 allow a factor of 2",
            )
        for name in ("probability_bounds", "binary_kl_bounds"):
            bounds = getattr(self, name)
            require(
                bounds is None or min(bounds) >= 0,
                f"off_policy.{name}",
                "must be two numbers of at least 0",
                bounds,
                "0.2 and 0.2 are usual",
            )
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
    """Last share of the limit, over which the reward falls linearly (DAPO: 0.2). 0: no shaping."""
    penalty: float = 1.0
    """Reward that a response at the limit loses."""
    filter: bool = False
    """Exclude responses cut off at the limit from the loss."""

    def __post_init__(self) -> None:
        at_least(0, overlong__penalty=self.penalty)
        require(
            0 <= self.buffer <= 1,
            "overlong.buffer",
            "must lie in 0 … 1",
            self.buffer,
            "DAPO's is 0.2",
        )


@dataclass(frozen=True, kw_only=True)
class GapConfig:
    """Limits on a step's token_mult_prob_error, the mean of exp |log π_trainer - log π_sampler|:
    1 if sampler and trainer agree.
    """

    warn: float | None = 1.05
    """Gap from which to warn, and again whenever its excess over 1 has doubled, but for tokens of
    older weights (async.max_staleness). None: never.
    """
    stop: float | None = None
    """Gap that ends the run with an error. None: never."""

    def __post_init__(self) -> None:
        for name, bound in (("warn", self.warn), ("stop", self.stop)):
            require(
                bound is None or bound > 1,
                f"gap.{name}",
                "must be above 1 or None",
                bound,
                "1 is agreement; 1.05 is 5 % off on average",
            )


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Sampling that goes on while the trainer steps (docs/asynchrony.md)."""

    max_staleness: int = 0
    """Steps by which a token's weights may be older than the step that trains on it. 0: the trainer
    waits for samples of its weights.
    """
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What new weights do with unfinished responses. keep: they go on with the new weights; wait:
    they end with the old ones first; abort: they are drawn again.
    """

    def __post_init__(self) -> None:
        at_least(0, async__max_staleness=self.max_staleness)
        require(
            self.max_staleness > 0 or self.in_flight == "keep",
            "async.in_flight",
            "is for async.max_staleness of 1 or more",
            self.in_flight,
            "add --async.max-staleness 1, or remove it",
        )


@dataclass(frozen=True, kw_only=True)
class ReceiptsConfig:
    """What a run proves of itself in every step (docs/receipts.md)."""

    on_failure: Literal["stop", "warn"] = "stop"
    """What happens where a receipt does not hold: the run ends with an error, or warns."""
    support: float | None = 0.02
    """Where top_p, top_k or min_p are on: largest distance from 1 of the mean of
    π_trainer/π_sampler, beyond four standard errors. None: it is measured only.
    """

    def __post_init__(self) -> None:
        require(
            self.support is None or self.support > 0,
            "receipts.support",
            "must be above 0 or None",
            self.support,
            "0.02 allows 2 %",
        )


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(RewardConfig, BaseConfig):
    """What algorithms have in common that train on responses of the policy."""

    loss: PolicyLossConfig = field(default_factory=ClippedLoss)
    kl: KLConfig = field(default_factory=KLConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    async_: Annotated[AsyncConfig, Field(alias="async")] = field(default_factory=AsyncConfig)
    receipts: ReceiptsConfig = field(default_factory=ReceiptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reduction: Literal["token_mean", "sequence_mean", "constant", "group_mean"] = "sequence_mean"
    """Weighting of tokens (constant: divided by generation.max_new_tokens, as in Dr. GRPO)."""
    num_prompts_per_step: int = 32
    """Prompts per rollout batch."""
    num_generations_per_prompt: int = 8
    """Responses per prompt: the group size."""
    max_num_steps: int = 100
    """Number of rollout batches."""
    train_global_batch_size: int | None = None
    """Sequences per optimizer step. None: the whole rollout batch."""
    num_updates_per_batch: int = 1
    """Passes over each rollout batch."""
    entropy_coef: float | None = 0.0
    """Weight of the entropy bonus; 0 only reports the entropy. None: not computed, which is faster.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(
            1,
            num_prompts_per_step=self.num_prompts_per_step,
            num_generations_per_prompt=self.num_generations_per_prompt,
            max_num_steps=self.max_num_steps,
            train_global_batch_size=self.train_global_batch_size,
            num_updates_per_batch=self.num_updates_per_batch,
        )
        self._check_async()
        self._check_off_policy()
        responses = self.num_prompts_per_step * self.num_generations_per_prompt
        require(
            responses % (self.train_global_batch_size or 1) == 0,
            "train_global_batch_size",
            f"must divide the {responses} responses of a rollout batch (num_prompts_per_step ·"
            " num_generations_per_prompt)",
            self.train_global_batch_size,
            "all optimizer steps are of one size",
        )
        require(
            self.generation.temperature > 0,
            "generation.temperature",
            "must be above 0 for training",
            self.generation.temperature,
            "1.0 is usual",
        )

    def _check_async(self) -> None:
        require(
            self.async_.max_staleness < self.max_num_steps or not self.async_.max_staleness,
            "async.max_staleness",
            f"must be below max_num_steps ({self.max_num_steps})",
            self.async_.max_staleness,
            "1 to 4 is usual",
        )
        engines = self.generation
        shares = engines.traits.embedded or engines.traits.shares_model
        for pauses, what, remedy in (
            (shares, f"backend {engines.backend}", "backend vllm"),
            (engines.colocated, "colocated", "no-colocated"),
        ):
            require(
                not pauses or self.async_.in_flight != "wait",
                "async.in_flight",
                f"must be keep or abort with generation.{what}",
                "wait",
                f"use keep, or --generation.{remedy}",
            )

    def _check_off_policy(self) -> None:
        chosen, off = self.off_policy, self.off_policy_mode == "none"
        require(
            self.off_policy.proximal == "recompute" or not self.needs_kl_reward,
            "off_policy.proximal",
            "must be recompute with advantage.kl_coef above 0",
            self.off_policy.proximal,
            "use recompute, or set kl_coef to 0",
        )
        staleness = f" with async.max_staleness {self.max_staleness}" * (chosen.mode == "auto")
        require(
            off or not isinstance(self.loss, OwnLoss) or "importance_weights" in self.loss.takes,
            "off_policy.mode",
            f"must be none for the loss {self.loss.name}, which has no parameter"
            " importance_weights",
            chosen.mode + staleness,
            "give it one and multiply the terms by it, or set none",
        )
        if off:
            refuse_unused(
                "off_policy",
                chosen,
                "needs off_policy.mode truncate, mask or sequence_mask",
                "set a mode, or remove it",
                names=[name for name in vars(chosen) if "bound" in name or "binary" in name],
            )

    def doubts(self) -> Sequence[str]:
        if self.max_staleness and self.generation.traits.engines and self.generation.colocated:
            return [
                "generation.colocated is true, so that engines pause while the trainer steps:"
                " --generation.colocated false gives them devices of their own"
            ]
        return ()

    @property
    def max_staleness(self) -> int:
        """async.max_staleness."""
        return self.async_.max_staleness

    @property
    def off_policy_mode(self) -> str:
        """off_policy.mode, with auto resolved."""
        if self.off_policy.mode != "auto":
            return self.off_policy.mode
        return "truncate" if self.max_staleness >= 1 else "none"

    @cached_property
    def interpolates(self) -> bool:
        """Whether π_prev is estimated from the tokens' versions."""
        return self.off_policy.proximal == "interpolate" and self.updates_per_step > 1

    @property
    def updates_per_step(self) -> int:
        return self.updates_on(self.num_prompts_per_step * self.num_generations_per_prompt)

    def updates_on(self, num_responses: int) -> int:
        """Return the number of optimizer steps on that many responses."""
        size = self.train_global_batch_size or num_responses
        return self.num_updates_per_batch * -(-num_responses // size)

    @cached_property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self.kl.coef > 0 or self.needs_kl_reward

    @property
    def needs_kl_reward(self) -> bool:
        """Whether the reward holds a KL penalty per token."""
        return getattr(getattr(self, "advantage", None), "kl_coef", 0.0) > 0


def require_token_loss(config: OnlineConfig, what: str) -> None:
    """Refuse a loss of whole sequences for advantages that differ inside them."""
    loss = config.loss
    require(
        not isinstance(loss, GMPOLoss | GSPOLoss) or getattr(loss, "token_gradient", False),
        "loss",
        f"must be of tokens with {what}",
        loss.name,
        "take another, or gspo --loss.token-gradient",
    )


def check_groups(config: OnlineConfig) -> None:
    """Refuse advantages that do not fit the other settings of a config."""
    advantage: Any = vars(config)["advantage"]
    match advantage:
        case ReinforcePlusPlusAdvantage(group_baseline=compares_groups):
            pass
        case GroupAdvantage(baseline="batch_mean" | "none", scale="batch_std" | "none"):
            compares_groups = False
        case _:
            compares_groups = not isinstance(advantage, OwnAdvantage)
    if isinstance(advantage, GroupAdvantage) and advantage.level == "turn":
        require_token_loss(config, "advantage.level turn")
        require(
            not config.overlong.buffer and advantage.baseline != "length_weighted",
            "advantage.level",
            "is not for overlong.buffer and advantage.baseline length_weighted",
            "turn",
            "change one of them",
        )
    require(
        config.num_generations_per_prompt > 1 or not compares_groups,
        "num_generations_per_prompt",
        "must be at least 2 where responses are compared within their group",
        config.num_generations_per_prompt,
        "use 2 or more, or --advantage.baseline batch_mean --advantage.scale batch_std",
    )
    k = advantage.k if isinstance(advantage, PassAtKAdvantage) else 1
    require(
        k <= config.num_generations_per_prompt,
        "advantage.k",
        "must be at most num_generations_per_prompt",
        k,
        f"use up to {config.num_generations_per_prompt}",
    )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnlineConfig):
    """Reinforcement learning from groups of responses per prompt. Its relatives: see --preset."""

    advantage: AdvantageConfig = field(default_factory=GroupAdvantage)
    dynamic_sampling: bool = False
    """Replace groups whose rewards, before shaping, are all equal by fresh ones (DAPO)."""
    max_sampling_rounds: int = 4
    """Rounds after which dynamic sampling continues with the groups that it has. 16 steps in a row
    with none end the run.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_sampling_rounds=self.max_sampling_rounds)
        check_groups(self)
        require(
            self.num_generations_per_prompt > 1 or not self.dynamic_sampling,
            "dynamic_sampling",
            "needs num_generations_per_prompt of at least 2: it keeps prompts whose rewards differ",
            True,
            "turn it off, or use 2 or more",
        )


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coef": 0.04}},
    "dr_grpo": {
        "advantage": {"name": "group", "baseline": "group_mean", "scale": "none"},
        "reduction": "constant",
    },
    "rloo": {
        "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "none"},
        "loss": {"name": "reinforce"},
        "reduction": "constant",
    },
    # examples/configs/grpo_math_1B.yaml; newer ones differentiate the penalty as kl.gradient score.
    "nemo_grpo": {
        "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "leave_one_out_std"},
        "reduction": "token_mean",
        "kl": {"coef": 0.01},
    },
    # The buffer of 4,096 tokens is a fifth of the longest response, 20,480.
    "dapo": {
        "loss": {"name": "clipped", "clip_low": 0.2, "clip_high": 0.28},
        "reduction": "token_mean",
        "overlong": {"buffer": 0.2, "penalty": 1.0, "filter": True},
        "dynamic_sampling": True,
        "kl": {"coef": 0.0},
    },
    "gspo": {"loss": {"name": "gspo"}},
    # The paper gives no number; the bound of 5 on the ratio is ScaleRL's (arXiv 2510.13786).
    "cispo": {"loss": {"name": "cispo", "clip_high": 4.0}, "reduction": "token_mean"},
    "sapo": {"loss": {"name": "sapo"}},
    "gmpo": {"loss": {"name": "gmpo"}},
    "max_rl": {
        "advantage": {"name": "group", "scale": "group_mean"},
        "loss": {"name": "reinforce"},
        "reduction": "constant",
    },
    "pass_at_k": {
        "advantage": {"name": "pass_at_k"},
        "loss": {"name": "reinforce"},
        "reduction": "constant",
    },
    # The coefficient is OpenRLHF's default.
    "reinforce_plus_plus": {
        "advantage": {"name": "reinforce_plus_plus", "kl_coef": 0.01},
        "reduction": "token_mean",
    },
}

DESCRIPTIONS = {
    "grpo": "group mean and deviation, KL penalty (DeepSeekMath, arXiv 2402.03300)",
    "dr_grpo": "no division by deviation or length (R1-Zero-like training, arXiv 2503.20783)",
    "rloo": "leave-one-out baseline, REINFORCE (Back to Basics, arXiv 2402.14740)",
    "nemo_grpo": "leave-one-out mean and deviation, token mean, KL penalty (NeMo RL)",
    "dapo": "clip-higher, token mean, overlong shaping, dynamic sampling (arXiv 2503.14476)",
    "gspo": "sequence-level ratio (Qwen's GSPO, arXiv 2507.18071)",
    "cispo": "REINFORCE with a clipped importance weight (MiniMax-M1, arXiv 2506.13585)",
    "sapo": "soft gate in place of the clip (Qwen's SAPO, arXiv 2511.20347)",
    "gmpo": "geometric mean of a sequence's clipped ratios (arXiv 2507.20673)",
    "max_rl": "group mean as baseline and divisor, REINFORCE (MaxRL, arXiv 2602.02710)",
    "pass_at_k": "best of 4 responses, REINFORCE (PKPO, arXiv 2505.15201)",
    "reinforce_plus_plus": "KL in the reward, whitened over the batch (arXiv 2501.03262)",
}


def of_preset(cls: type, name: str | None) -> dict[str, Any]:
    """Return the defaults of a config with what a preset changes, if one is named.

    Raises: ValueError for an unknown name, or a config without presets.
    """
    require(name is None or issubclass(cls, GRPOConfig), "preset", "is for grpo", name, "remove it")
    if name is not None and name not in PRESETS:
        hint = algorithm_hint(name, PRESETS) or "."
        raise ValueError(f"unknown preset {name!r}{hint} Valid names: {', '.join(PRESETS)}")
    return layer(cls, {}, PRESETS[name] if name else {})


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> GRPOConfig:
    """Return a GRPO config from a preset and nested overrides.

    >>> config = preset("dapo", {"optimizer": {"lr": 1e-6}})
    >>> config.loss.clip_high, config.dynamic_sampling, config.optimizer.lr
    (0.28, True, 1e-06)
    """
    return construct(GRPOConfig, layer(GRPOConfig, of_preset(GRPOConfig, name), overrides or {}))

"""The settings of training on rows that are there: SFT, DPO with its relatives, reward models."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from nemorl.checks import at_least, refuse_unused, require
from nemorl.runtime.config.base import BaseConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(BaseConfig):
    """Batches of rows, through all of them one or several times."""

    train_global_batch_size: int = 32
    """Rows per optimizer step: sequences, pairs, or responses (kto)."""
    max_num_steps: int | None = None
    """Number of optimizer steps. None: as num_epochs says."""
    num_epochs: int = 1
    """Passes over the data if max_num_steps is not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.trainer.router_replay,
            "trainer.router_replay",
            "is for runs that train on what an engine samples (grpo)",
            True,
            "remove it",
        )
        at_least(
            1,
            train_global_batch_size=self.train_global_batch_size,
            max_num_steps=self.max_num_steps,
            num_epochs=self.num_epochs,
        )

    def planned_steps(self, num_rows: int) -> int:
        """Return `max_num_steps`, or the number of whole batches in `num_epochs`, at least 1."""
        whole = self.num_epochs * num_rows // self.train_global_batch_size
        return self.max_num_steps or max(1, whole)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RewardConfig, OfflineConfig):
    """Supervised fine-tuning on demonstrations. Rewards judge greedy answers to validation rows."""

    loss: Literal["nll", "dft"] = "nll"
    """-log π of each token, or, in dynamic fine-tuning, that times π, as a constant."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weighting of the loss: every token counts the same, or every sequence."""

    def generates(self, *, answers: bool) -> bool:
        """Return whether there are questions to validate on."""
        return answers


def _refuse_generation(config: OfflineConfig, name: str) -> None:
    refuse_unused(
        "generation",
        config.generation,
        f"can't be set for {name}, which samples nothing",
        "remove it",
    )


def _check_beta(beta: float) -> None:
    require(beta > 0, "loss.beta", "must be positive", beta, "0.1 is usual (simpo: 2.0)")


def _check_label_smoothing(value: float) -> None:
    require(
        0 <= value < 0.5,
        "loss.label_smoothing",
        "must lie in 0 … 0.5 (0.5 excluded)",
        value,
        "try 0.1",
    )


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """-log σ(β · log-ratio of the pair): direct preference optimization."""

    name: Literal["dpo"] = "dpo"
    beta: float = 0.1
    """Scale of the implicit reward log π/π_ref: the smaller, the further the policy moves."""
    label_smoothing: float = 0.0
    """Share of pairs whose label is thought wrong (conservative DPO)."""
    robust: bool = False
    """Use the loss that is unbiased under such labels (robust DPO); needs label_smoothing."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] | float = "reverse_kl"
    """What holds the policy near the reference (f-DPO); a number: the α-divergence."""
    average_logprobs: bool = False
    """Average over a response's tokens instead of summing."""

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        _check_label_smoothing(self.label_smoothing)
        require(
            not self.robust or self.label_smoothing > 0,
            "loss.robust",
            "needs loss.label_smoothing",
            self.robust,
            "add --loss.label-smoothing 0.1",
        )
        require(
            isinstance(self.divergence, str) or 0 <= self.divergence <= 1,
            "loss.divergence",
            "must lie in 0 … 1",
            self.divergence,
            "0.5 is usual",
        )


@dataclass(frozen=True, kw_only=True)
class IPOLoss:
    """(log-ratio of the pair - 1/(2β))²: identity preference optimization."""

    name: Literal["ipo"] = "ipo"
    beta: float = 0.1
    """The log-ratio's target is 1/(2β)."""
    average_logprobs: bool = True
    """Average over a response's tokens, as its authors and TRL do."""

    def __post_init__(self) -> None:
        _check_beta(self.beta)


@dataclass(frozen=True, kw_only=True)
class HingeLoss:
    """max(0, 1 - β · log-ratio of the pair): sequence likelihood calibration (SLiC-HF, RSO)."""

    name: Literal["hinge"] = "hinge"
    beta: float = 0.1
    """Scale of the log-ratio. Pairs whose log-ratio reaches 1/β no longer count."""
    average_logprobs: bool = False
    """Average over a response's tokens instead of summing."""

    def __post_init__(self) -> None:
        _check_beta(self.beta)


@dataclass(frozen=True, kw_only=True)
class SimPOLoss:
    """-log σ(β · difference of the mean logprobs - margin): simple preference optimization, without
    a reference.
    """

    name: Literal["simpo"] = "simpo"
    beta: float = 2.0
    """Scale of the mean logprobs."""
    margin: float = 1.0
    """Margin by which the chosen response should win (γ of the paper)."""
    label_smoothing: float = 0.0
    """Share of pairs whose label is thought wrong."""

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        _check_label_smoothing(self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class ORPOLoss:
    """Supervised learning of the chosen responses with an odds-ratio term, without a reference."""

    name: Literal["orpo"] = "orpo"
    coef: float = 0.1
    """Weight of the odds-ratio term (λ of the paper, TRL's beta)."""

    def __post_init__(self) -> None:
        require(self.coef > 0, "loss.coef", "must be positive", self.coef, "0.1 is usual")


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """Kahneman-Tversky optimization of single responses, each labeled desirable or not (pairs are
    split).
    """

    name: Literal["kto"] = "kto"
    beta: float = 0.1
    """Scale of the implicit reward log π/π_ref."""
    desirable_coef: float = 1.0
    """Weight of desirable responses."""
    undesirable_coef: float = 1.0
    """Weight of undesirable responses."""
    baseline: Literal["mismatched", "none"] = "mismatched"
    """Baseline of rewards: the KL from the reference on prompts with other prompts' responses, or 0
    (TRL's apo_zero_unpaired).
    """

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        at_least(
            0,
            loss__desirable_coef=self.desirable_coef,
            loss__undesirable_coef=self.undesirable_coef,
        )


PreferenceLossConfig = Annotated[
    DPOLoss | IPOLoss | HingeLoss | SimPOLoss | ORPOLoss | KTOLoss, Field(discriminator="name")
]


@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Preference learning without sampling: DPO and its relatives (see --loss)."""

    loss: PreferenceLossConfig = field(default_factory=DPOLoss)
    reference: Literal["live", "precomputed"] = "live"
    """Source of the reference's logprobs: a frozen copy of the initial model, or one pass over all
    data before the first step. simpo and orpo need neither.
    """
    sft_coef: float | None = None
    """Weight of an additional negative log-likelihood of the chosen (desirable) responses. None: 1
    for orpo, 0 otherwise.
    """
    sft_reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weighting of that term: by token or by response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, sft_coef=self.sft_coef)
        self.require_room(self.longest_row, "the longest pair, which stays together")
        require(
            self.reference == "live" or self.needs_reference,
            "reference",
            f"can't be precomputed for {self.loss.name}, which compares with no reference",
            self.reference,
            "remove it",
        )
        _refuse_generation(self, "dpo")

    @property
    def longest_row(self) -> int:
        """Tokens of the longest pair, or for KTO of the longest sequence."""
        return super().longest_row * (1 if isinstance(self.loss, KTOLoss) else 2)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the initial model."""
        return not isinstance(self.loss, SimPOLoss | ORPOLoss)

    @property
    def sft_weight(self) -> float:
        """Weight of the likelihood term."""
        if self.sft_coef is not None:
            return self.sft_coef
        return 1.0 if isinstance(self.loss, ORPOLoss) else 0.0


@dataclass(frozen=True, kw_only=True)
class RMConfig(OfflineConfig):
    """Reward models: a score for each response, learned from preferences (Bradley-Terry)."""

    centering: float = 0.01
    """Coefficient of (chosen + rejected score)², which draws scores to 0 (κ; TRL's
    center_rewards_coefficient).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, centering=self.centering)
        self.require_room(self.longest_row, "the longest pair, which stays together")
        _refuse_generation(self, "rm")

    @property
    def head(self) -> Literal["lm", "scalar"]:
        """A score in place of tokens' probabilities."""
        return "scalar"

    @property
    def longest_row(self) -> int:
        """Tokens of the longest pair, with one after each response for its score."""
        return 2 * (super().longest_row + 1)

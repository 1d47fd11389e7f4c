"""Every knob of a run, as frozen dataclasses: sections one level deep, free of torch, checked when they are made.

A choice between algorithms (the policy loss, the advantage) is a union of dataclasses: what a variant has no use for can't be written down. In YAML
and on the command line a variant is chosen by its `name` (`loss: {name: gspo}`, `--loss gspo`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from nemorl.checks import at_least, require
from nemorl.parallel.config import ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.rollout.generation import SamplingParams


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and which of their columns are used."""

    train: str | None = None
    """A local .jsonl, .json, .parquet or .csv file, or the name of a data set on the hub."""
    validation: str | None = None
    """Rows to validate on, named in the same way."""
    split: str = "train"
    """The split that is taken of a hub data set for training."""
    validation_split: str = "validation"
    """The split that is taken of a hub data set for validation."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    response_column: str = "response"
    """Column of the demonstration that SFT learns."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    messages_column: str = "messages"
    """Column of whole conversations, used where a row has it (SFT)."""
    max_total_sequence_length: int = 2048
    """Tokens of prompt and response together."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to a row that is longer: an error that names it, leave it out, or cut its end (a prompt's beginning). Counted in either case."""
    shuffle: bool = True
    """A new order in every epoch, from the seed; otherwise the rows' own order."""

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    backend: str = "torch"
    """Name of the generation backend; torch is embedded and shares the trainer's weights."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    max_new_tokens: int = 256
    """Longest response, in tokens."""
    stop_strings: tuple[str, ...] = ()
    """A response ends where one of these appears in its text."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with one of these tokens, as with the tokenizer's end-of-sequence token."""
    max_batch_size: int = 256
    """Sequences that the embedded engine decodes at a time; the rest wait for a free place."""

    def __post_init__(self) -> None:
        at_least(1, generation__max_new_tokens=self.max_new_tokens, generation__max_batch_size=self.max_batch_size)
        self.sampling_params()

    def sampling_params(self, *, greedy: bool = False) -> SamplingParams:
        """What a request of this run asks for; greedy: the same limits and stops, but always the likeliest token."""
        filters: dict[str, Any] = {} if greedy else {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            max_new_tokens=self.max_new_tokens,
            stop_strings=tuple(self.stop_strings),
            stop_token_ids=tuple(self.stop_token_ids),
            **filters,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped surrogate, token by token (GRPO, DAPO, Dr. GRPO)."""

    name: Literal["clipped"] = "clipped"
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Where the advantage is negative, bound the loss at this multiple of it (3 is usual)."""


@dataclass(frozen=True, kw_only=True)
class GSPOLoss:
    """The clipped surrogate of the whole sequence's ratio (GSPO)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = 3e-4
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped above at 1 + clip_high."""
    token_gradient: bool = False
    """GSPO-token: the same value, with a gradient per token."""


@dataclass(frozen=True, kw_only=True)
class CISPOLoss:
    """REINFORCE weighted by the clipped, stopped ratio (MiniMax-M1)."""

    name: Literal["cispo"] = "cispo"
    clip_low: float | None = None
    """Lower clip of the ratio at 1 - clip_low; None: no lower bound, as in MiniMax-M1."""
    clip_high: float = 0.28
    """Upper clip of the ratio at 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss:
    """Plain REINFORCE: -A · log π (RLOO)."""

    name: Literal["reinforce"] = "reinforce"


PolicyLossConfig = ClippedLoss | GSPOLoss | CISPOLoss | ReinforceLoss


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """(reward - baseline) / scale within the responses to one prompt."""

    name: Literal["group"] = "group"
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none", "length_weighted"] = "group_mean"
    """What is subtracted from a reward."""
    scale: Literal["group_std", "leave_one_out_std", "batch_std", "none"] = "group_std"
    """What the difference is divided by."""
    ddof: int = 1
    """1: standard deviation with n - 1; 0: with n."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantage:
    """REINFORCE++: reward minus a per-token KL penalty, whitened over the batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_coef: float = 0.0
    """Weight of the per-token penalty log π_prev - log π_ref inside the reward; above 0 a reference model is kept."""
    group_baseline: bool = False
    """REINFORCE++-baseline: subtract the group's mean reward first."""


AdvantageConfig = GroupAdvantage | ReinforcePlusPlusAdvantage


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """A penalty on leaving the reference model, added to the loss."""

    coef: float = 0.0
    """Weight of the penalty; above 0 a frozen copy of the initial model is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of KL(π‖π_ref)."""
    gradient: Literal["pathwise", "score", "importance"] = "pathwise"
    """What is differentiated: the estimate alone, with the score-function term, or weighted by π/π_gen."""

    def __post_init__(self) -> None:
        at_least(0, kl__coef=self.coef)


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Correction for the gap between the sampler's probabilities and the trainer's, w = π_prev/π_gen."""

    mode: Literal["none", "truncate", "mask", "sequence_mask"] = "none"
    """truncate: clamp w (TIS); mask: drop tokens with w outside the bounds (IcePop); sequence_mask: drop whole sequences."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """w of each token, of the sequence (product), or its geometric mean."""
    min: float = 0.0
    """Lower bound of w."""
    max: float = 2.0
    """Upper bound of w."""

    def __post_init__(self) -> None:
        require(0 <= self.min < self.max, "off_policy.min", "must be at least 0 and below off_policy.max", self.min, f"off_policy.max is {self.max}")


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """What becomes of responses that reach generation.max_new_tokens (DAPO)."""

    buffer: float = 0.0
    """The last share of the limit over which the reward falls linearly by up to `penalty` (DAPO: 0.2); 0: no shaping."""
    penalty: float = 1.0
    """What a response at the limit loses."""
    filter: bool = False
    """Leave responses that were cut off at the limit out of the loss."""

    def __post_init__(self) -> None:
        at_least(0, overlong__penalty=self.penalty)
        require(
            0 <= self.buffer <= 1, "overlong.buffer", "must lie in 0 … 1", self.buffer, "it is a share of generation.max_new_tokens; DAPO's is 0.2"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept, how often it validates and saves, and its seed."""

    dir: str = "runs/run"
    """The run's directory (metrics, samples, plots, checkpoints, export)."""
    resume: bool = False
    """Go on with the run in `dir` from its last checkpoint. Without it a directory that holds a run is an error."""
    seed: int = 0
    """Of everything random: fresh weights, the order of the data, sampling."""
    val_period: int = 0
    """Validate every this many steps (and at the end); 0: only at the end."""
    val_at_start: bool = False
    """Validate before the first step, too."""
    max_val_samples: int = 256
    """Validation rows that are used, from the top."""
    save_period: int = 0
    """Write a checkpoint every this many steps (and at the end); 0: only at the end."""
    keep_checkpoints: int = 2
    """Older checkpoints than the newest this many are removed."""
    samples_per_step: int = 8
    """Responses per step that are written to samples/."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """Live table, one line a step, or nothing. auto: live in a terminal, plain elsewhere."""
    tensorboard: bool | None = None
    """Write TensorBoard events. None: when the package tensorboard is installed."""
    plots: bool = True
    """Draw plots/*.png when the run ends."""
    export: bool = True
    """Write the trained model to hf/ when the run ends."""

    def __post_init__(self) -> None:
        at_least(
            0, run__val_period=self.val_period, run__save_period=self.save_period, run__samples_per_step=self.samples_per_step, run__seed=self.seed
        )
        at_least(1, run__keep_checkpoints=self.keep_checkpoints, run__max_val_samples=self.max_val_samples)


Reduction = Literal["token_mean", "sequence_mean", "constant", "group_mean"]


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning on demonstrations."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Used for validation by answering, where the validation rows have an answer."""
    run: RunConfig = field(default_factory=RunConfig)
    train_global_batch_size: int = 32
    """Sequences per optimizer step."""
    max_num_steps: int | None = None
    """Optimizer steps; None: as num_epochs says."""
    num_epochs: int = 1
    """Passes over the data, where max_num_steps is not given."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token counts the same, or every sequence."""
    reward: str = "exact_match"
    """How validation answers are judged; as in GRPO."""

    def __post_init__(self) -> None:
        at_least(1, train_global_batch_size=self.train_global_batch_size, max_num_steps=self.max_num_steps, num_epochs=self.num_epochs)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Reinforcement learning from groups of responses per prompt: GRPO and its relatives (see --preset)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    loss: PolicyLossConfig = field(default_factory=ClippedLoss)
    advantage: AdvantageConfig = field(default_factory=GroupAdvantage)
    kl: KLConfig = field(default_factory=KLConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    reward: str = "exact_match"
    """A reward by name, or module:function of your own, called as fn(prompt, response) with any data columns that it names as parameters."""
    reduction: Reduction = "sequence_mean"
    """How tokens are weighted in the loss (constant: divided by generation.max_new_tokens, as in Dr. GRPO)."""
    num_prompts_per_step: int = 32
    """Prompts per rollout batch."""
    num_generations_per_prompt: int = 8
    """Responses per prompt: the group size."""
    max_num_steps: int = 100
    """Rollout batches."""
    train_global_batch_size: int | None = None
    """Sequences per optimizer step; a smaller number than the rollout batch gives several updates per batch. None: one update."""
    num_updates_per_batch: int = 1
    """Passes over each rollout batch."""
    dynamic_sampling: bool = False
    """DAPO: replace groups whose rewards are all equal by fresh ones, a whole group at a time."""
    max_sampling_rounds: int = 4
    """Rollout rounds after which dynamic sampling goes on with the groups that it has."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        at_least(
            1,
            num_prompts_per_step=self.num_prompts_per_step,
            num_generations_per_prompt=self.num_generations_per_prompt,
            max_num_steps=self.max_num_steps,
            train_global_batch_size=self.train_global_batch_size,
            num_updates_per_batch=self.num_updates_per_batch,
            max_sampling_rounds=self.max_sampling_rounds,
        )
        ungrouped = isinstance(self.advantage, ReinforcePlusPlusAdvantage) or self.advantage.baseline in ("batch_mean", "none")
        require(
            ungrouped or self.num_generations_per_prompt > 1,
            "num_generations_per_prompt",
            "must be at least 2 with a group baseline",
            self.num_generations_per_prompt,
            "a group of one is its own baseline and teaches nothing; use 2 or more, or --advantage.baseline batch_mean",
        )
        require(
            self.generation.temperature > 0,
            "generation.temperature",
            "must be above 0 for training",
            self.generation.temperature,
            "greedy samples of a group are all the same; 1.0 is usual",
        )
        require(
            self.generation.max_new_tokens < self.data.max_total_sequence_length,
            "generation.max_new_tokens",
            "must be below data.max_total_sequence_length",
            self.generation.max_new_tokens,
            f"data.max_total_sequence_length is {self.data.max_total_sequence_length}; leave room for the prompt",
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self.kl.coef > 0 or (isinstance(self.advantage, ReinforcePlusPlusAdvantage) and self.advantage.kl_coef > 0)

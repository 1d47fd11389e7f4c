"""The settings of SFT and GRPO, and the sections that every algorithm has.

Frozen dataclasses, free of torch, that check themselves when they are made. A choice between
variants is a union of dataclasses: a setting that a variant does not use can't be written.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from nemorl.checks import at_least, require
from nemorl.parallel.config import (
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ProfileConfig,
    TrainerConfig,
    check_lora,
)
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.config.metric_rules import Condition, Ranking
from nemorl.runtime.config.policy import (
    AdvantageConfig,
    ClippedLoss,
    GapConfig,
    GroupAdvantage,
    KLConfig,
    OffPolicyConfig,
    OverlongConfig,
    PolicyLossConfig,
    ReinforcePlusPlusAdvantage,
)
from nemorl.runtime.config.runtime import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and which of their columns are used."""

    train: str | tuple[str, ...] | None = None
    """Training rows: a local .jsonl, .json, .parquet or .csv file, or the name of a data set on the
    hub (NAME:CONFIGURATION if it has several); or several of these.
    """
    weights: tuple[float, ...] = ()
    """Relative share of each of several training sets. Default: each row once an epoch."""
    validation: str | tuple[str, ...] | None = None
    """Rows to validate on, named in the same way."""
    held_out: float = 0.0
    """Training rows kept for validation if there is no validation set: a share (below 1) or a
    number of rows.
    """
    split: str = "train"
    """Split of a hub data set to train on."""
    validation_split: str | None = None
    """Split of a hub data set to validate on. Default: "validation"."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    response_column: str = "response"
    """Column of the demonstration that SFT learns."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    messages_column: str = "messages"
    """Column of whole conversations, used for rows that have it (SFT)."""
    chosen_column: str = "chosen"
    """Column of the better answer of a preference pair (DPO)."""
    rejected_column: str = "rejected"
    """Column of the worse answer of a preference pair (DPO)."""
    label_column: str = "label"
    """Column that labels a single answer as desirable, true or false (KTO)."""
    max_total_sequence_length: int = 2048
    """Longest sequence, prompt and response together, in tokens."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Handling of longer rows: an error that names the row, drop it, or cut its end (a prompt's
    beginning). Dropped and cut rows are counted.
    """
    shuffle: bool = True
    """Shuffle the rows anew in every epoch, by run.seed."""

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)
        at_least(0, data__held_out=self.held_out)
        sets = self.train if isinstance(self.train, tuple) else (self.train,)
        require(
            not self.weights or self.train is None or len(self.weights) == len(sets),
            "data.weights",
            f"must be as many as there are training sets ({len(sets)})",
            self.weights,
            "give one weight for each of data.train, or none",
        )
        require(
            all(0 < weight < math.inf for weight in self.weights),
            "data.weights",
            "must be positive",
            self.weights,
            "remove the set instead",
        )
        require(
            self.held_out < 1 or self.held_out == int(self.held_out),
            "data.held_out",
            "must be a share below 1 or a whole number of rows",
            self.held_out,
            "0.05 holds out every twentieth row, 100 a hundred rows",
        )
        require(
            not (self.held_out and self.validation),
            "data.held_out",
            "is for runs without data.validation",
            self.held_out,
            "remove one of the two",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept, how often it validates and saves, and its seed."""

    dir: str | None = None
    """Directory of the run (metrics, samples, plots, checkpoints, export). Default: the first of
    runs/grpo, runs/grpo-2, … that is free.
    """
    resume: bool = False
    """Continue the run in `dir` from its last checkpoint. Without it, a directory that holds a run
    is an error.
    """
    seed: int = 0
    """Seed of everything random: fresh weights, the order of the data, sampling."""
    val_period: int = 0
    """Steps between validations; there is always one at the end. 0: only that one."""
    val_at_start: bool = False
    """Validate before the first step, too."""
    max_val_samples: int = 256
    """Number of validation rows that are used, from the top."""
    save_period: int = 50
    """Steps between checkpoints; there is always one at the end. 0: only that one."""
    keep_checkpoints: int = 2
    """Number of checkpoints that are kept: the newest ones, or with `metric` the best ones and the
    newest.
    """
    async_save: bool = False
    """Continue training while a checkpoint is written, from a copy in main memory (about three
    times the weights, shared by the ranks).
    """
    metric: str | None = None
    """Metric that ranks checkpoints, such as val_accuracy. A validation that ranks among the best
    gets a checkpoint.
    """
    higher_is_better: bool | None = None
    """Whether a higher `metric` is better. Default: false for a loss, true for all else."""
    stop_when: str | None = None
    """Condition that ends the run early: "val_accuracy >= 0.95", "loss < 0.1"."""
    samples_per_step: int = 8
    """Number of responses written to samples/ in each step."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """Progress display: a live table, one line a step, or nothing. auto: live in a terminal, plain
    elsewhere.
    """
    loggers: tuple[str, ...] | None = None
    """Loggers of metrics besides metrics.jsonl: tensorboard, wandb, mlflow, or one that you
    registered. Default: tensorboard, if it is installed.
    """
    project: str | None = None
    """Project of W&B and experiment of MLflow. Default: as their environment variables say, or
    nemorl.
    """
    plots: bool = True
    """Draw plots/*.png when the run ends."""
    export: bool = True
    """Write the trained model to hf/ when the run ends."""

    def __post_init__(self) -> None:
        require(
            not self.resume or self.dir is not None,
            "run.dir",
            "must be given to resume a run",
            self.dir,
            "name the run's folder (--run.dir)",
        )
        at_least(
            0,
            run__val_period=self.val_period,
            run__save_period=self.save_period,
            run__samples_per_step=self.samples_per_step,
            run__seed=self.seed,
        )
        at_least(
            1,
            run__keep_checkpoints=self.keep_checkpoints,
            run__max_val_samples=self.max_val_samples,
        )
        require(
            self.metric is not None or self.higher_is_better is None,
            "run.higher_is_better",
            "needs run.metric",
            self.higher_is_better,
            "name its metric (--run.metric)",
        )
        self.stop_condition()

    def ranking(self) -> Ranking | None:
        """Return the order of the checkpoints, if there is a metric for it."""
        if self.metric is None:
            return None
        return Ranking(metric=self.metric, higher_is_better=self.higher_is_better)

    def metrics_of_rules(self) -> dict[str, str | None]:
        """Return the metrics that settings name, by setting."""
        condition = self.stop_condition()
        return {"run.metric": self.metric, "run.stop_when": condition.metric if condition else None}

    def stop_condition(self) -> Condition | None:
        """Return `stop_when` parsed. Raises ValueError for what is no condition."""
        return None if self.stop_when is None else Condition.parse(self.stop_when)


Reduction = Literal["token_mean", "sequence_mean", "constant", "group_mean"]


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The sections that every algorithm has.

    Derive your own config from this one and add its settings (see `register_algorithm`).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.require_room(self.data.max_total_sequence_length, "the longest sequence")
        check_lora(self.lora, self.model)

    def require_room(self, tokens: int, what: str) -> None:
        """Raise ValueError if a microbatch or packed row can't hold `tokens`."""
        for name in ("micro_batch_tokens", "packed_row_tokens"):
            size = getattr(self.trainer, name)
            require(
                size is None or size >= tokens,
                f"trainer.{name}",
                f"must hold {what}",
                size,
                f"data.max_total_sequence_length is {self.data.max_total_sequence_length}, so make"
                f" it {tokens} or more",
            )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning on demonstrations."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Used to validate by answering, if the validation rows have an answer."""
    train_global_batch_size: int = 32
    """Sequences per optimizer step."""
    max_num_steps: int | None = None
    """Number of optimizer steps. None: as num_epochs says."""
    num_epochs: int = 1
    """Passes over the data if max_num_steps is not given."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weighting of the loss: every token counts the same, or every sequence."""
    reward: str | tuple[str, ...] = "exact_match"
    """Reward that judges validation answers; as in GRPO."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each of several rewards. Default: 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(
            1,
            train_global_batch_size=self.train_global_batch_size,
            max_num_steps=self.max_num_steps,
            num_epochs=self.num_epochs,
        )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(BaseConfig):
    """Reinforcement learning from groups of responses per prompt: GRPO and its relatives (see
    --preset).
    """

    loss: PolicyLossConfig = field(default_factory=ClippedLoss)
    advantage: AdvantageConfig = field(default_factory=GroupAdvantage)
    kl: KLConfig = field(default_factory=KLConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    reward: str | tuple[str, ...] = "exact_match"
    """Rewards by name, or module:function of your own, called as fn(prompt, response) with any data
    columns that it names as parameters.
    """
    reward_weights: tuple[float, ...] = ()
    """Weight of each of several rewards in their sum. Default: 1."""
    reduction: Reduction = "sequence_mean"
    """Weighting of tokens in the loss (constant: divided by generation.max_new_tokens, as in Dr.
    GRPO).
    """
    num_prompts_per_step: int = 32
    """Prompts per rollout batch."""
    num_generations_per_prompt: int = 8
    """Responses per prompt: the group size."""
    max_num_steps: int = 100
    """Number of rollout batches that are sampled and trained on."""
    train_global_batch_size: int | None = None
    """Sequences per optimizer step; fewer than the rollout batch give several updates per batch.
    None: one update.
    """
    num_updates_per_batch: int = 1
    """Passes over each rollout batch."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by fresh ones, a whole group at a time (DAPO)."""
    max_sampling_rounds: int = 4
    """Rollout rounds after which dynamic sampling continues with the groups that it has."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(
            1,
            num_prompts_per_step=self.num_prompts_per_step,
            num_generations_per_prompt=self.num_generations_per_prompt,
            max_num_steps=self.max_num_steps,
            train_global_batch_size=self.train_global_batch_size,
            num_updates_per_batch=self.num_updates_per_batch,
            max_sampling_rounds=self.max_sampling_rounds,
        )
        require(
            self.num_generations_per_prompt > 1 or not self._compares_groups,
            "num_generations_per_prompt",
            "must be at least 2 where responses are compared within their group",
            self.num_generations_per_prompt,
            "a group of one teaches nothing; use 2 or more, or --advantage.baseline batch_mean"
            " --advantage.scale batch_std",
        )
        responses = self.num_prompts_per_step * self.num_generations_per_prompt
        require(
            responses % (self.train_global_batch_size or 1) == 0,
            "train_global_batch_size",
            f"must divide the {responses} responses of a rollout batch (num_prompts_per_step ·"
            " num_generations_per_prompt)",
            self.train_global_batch_size,
            "all optimizer steps must be of the same size",
        )
        require(
            self.generation.temperature > 0,
            "generation.temperature",
            "must be above 0 for training",
            self.generation.temperature,
            "greedy samples of a group are all the same; 1.0 is usual",
        )
        longest = self.data.max_total_sequence_length
        require(
            (self.generation.max_new_tokens or 0) < longest,
            "generation.max_new_tokens",
            "must be below data.max_total_sequence_length",
            self.generation.max_new_tokens,
            f"data.max_total_sequence_length is {longest}; leave room for the prompt",
        )

    @property
    def _compares_groups(self) -> bool:
        match self.advantage:
            case ReinforcePlusPlusAdvantage(group_baseline=group_baseline):
                return group_baseline
            case GroupAdvantage(baseline=baseline, scale=scale):
                alone = baseline in ("batch_mean", "none") and scale in ("batch_std", "none")
                return not alone

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self.kl.coef > 0 or (
            isinstance(self.advantage, ReinforcePlusPlusAdvantage) and self.advantage.kl_coef > 0
        )

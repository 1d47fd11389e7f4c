"""Every knob of a run, as frozen dataclasses: sections one level deep, free of torch, checked when
they are made.

A choice between algorithms (the policy loss, the advantage) is a union of dataclasses: what a
variant has no use for can't be written down. In YAML and on the command line a variant is chosen by
its `name` (`loss: {name: gspo}`, `--loss gspo`).
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
    """A local .jsonl, .json, .parquet or .csv file, or the name of a data set on the hub
    (NAME:CONFIGURATION where it has several); or several.
    """
    weights: tuple[float, ...] = ()
    """The share of each of several training sets, relative to each other; unless given, each row
    comes once an epoch.
    """
    validation: str | tuple[str, ...] | None = None
    """Rows to validate on, named in the same way."""
    held_out: float = 0.0
    """Training rows that are kept for validation where no validation set is given: a share (below
    1) or a number.
    """
    split: str = "train"
    """The split that is taken of a hub data set for training."""
    validation_split: str | None = None
    """The split that is taken of a hub data set for validation; "validation" unless given."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    response_column: str = "response"
    """Column of the demonstration that SFT learns."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    messages_column: str = "messages"
    """Column of whole conversations, used where a row has it (SFT)."""
    chosen_column: str = "chosen"
    """Column of the better answer of a preference pair (DPO)."""
    rejected_column: str = "rejected"
    """Column of the worse answer of a preference pair (DPO)."""
    label_column: str = "label"
    """Column that says of a lone answer whether it is wanted (KTO): true or false."""
    max_total_sequence_length: int = 2048
    """Tokens of prompt and response together."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to a row that is longer: an error that names it, leave it out, or cut its end (a
    prompt's beginning). Counted in either case.
    """
    shuffle: bool = True
    """A new order in every epoch, from the seed; otherwise the rows' own order."""

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)
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
            "leave a set out instead",
        )
        at_least(0, data__held_out=self.held_out)
        require(self.held_out < 1 or self.held_out == int(self.held_out), "data.held_out", "must be a share below 1 or a whole number of rows",
                self.held_out, "0.05 holds out every twentieth row, 100 a hundred rows")  # fmt: skip
        alone = not (self.held_out and self.validation)
        require(
            alone,
            "data.held_out",
            "is for runs without data.validation",
            self.held_out,
            "leave one of the two out",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept, how often it validates and saves, and its seed."""

    dir: str | None = None
    """The run's directory (metrics, samples, plots, checkpoints, export); unless given, the first
    of runs/grpo, runs/grpo-2, … that is free.
    """
    resume: bool = False
    """Go on with the run in `dir` from its last checkpoint.

    Without it a directory that holds a run is an error.
    """
    seed: int = 0
    """Of everything random: fresh weights, the order of the data, sampling."""
    val_period: int = 0
    """Validate every this many steps (and at the end); 0: only at the end."""
    val_at_start: bool = False
    """Validate before the first step, too."""
    max_val_samples: int = 256
    """Validation rows that are used, from the top."""
    save_period: int = 50
    """Write a checkpoint every this many steps (and at the end); 0: only at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept: the newest ones, or with `metric` the best ones besides the
    newest.
    """
    async_save: bool = False
    """Go on training while a checkpoint is written, from a copy in main memory (about three times
    the weights, shared by the ranks).
    """
    metric: str | None = None
    """A metric that says which checkpoints are best, such as val_accuracy; validations that are
    among the best then get a checkpoint, too.
    """
    higher_is_better: bool | None = None
    """Which way `metric` is better. Unless given: lower for a loss, higher for all else."""
    stop_when: str | None = None
    """End the run when a metric has come so far: "val_accuracy >= 0.95", "loss < 0.1"."""
    samples_per_step: int = 8
    """Responses per step that are written to samples/."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """Live table, one line a step, or nothing. auto: live in a terminal, plain elsewhere."""
    loggers: tuple[str, ...] | None = None
    """Where the metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or what you
    registered. None: to tensorboard, if it is installed.
    """
    project: str | None = None
    """What W&B calls project and MLflow experiment; as their environment variables say unless
    given, otherwise nemorl.
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
        require(self.metric is not None or self.higher_is_better is None, "run.higher_is_better", "needs run.metric", self.higher_is_better,
                "name the metric that it is about (--run.metric)")  # fmt: skip
        self.stop_condition()

    def ranking(self) -> Ranking | None:
        """The order of the checkpoints, if there is a metric for it."""
        return (
            None
            if self.metric is None
            else Ranking(metric=self.metric, higher_is_better=self.higher_is_better)
        )

    def metrics_of_rules(self) -> dict[str, str | None]:
        """The metrics that settings are about, by setting."""
        condition = self.stop_condition()
        return {"run.metric": self.metric, "run.stop_when": condition.metric if condition else None}

    def stop_condition(self) -> Condition | None:
        """`stop_when` as it is understood. Raises ValueError for what can't be."""
        return None if self.stop_when is None else Condition.parse(self.stop_when)


Reduction = Literal["token_mean", "sequence_mean", "constant", "group_mean"]


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The sections that every algorithm has.

    A config of your own derives from this one and adds its settings (see `register_algorithm`).
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
        """A sequence of the greatest length that the data may have must fit where it is put, so
        that no step fails on the first long one.
        """
        longest = self.data.max_total_sequence_length
        for name in ("micro_batch_tokens", "packed_row_tokens"):
            size, remedy = (
                getattr(self.trainer, name),
                f"data.max_total_sequence_length is {longest}",
            )
            require(
                size is None or size >= longest,
                f"trainer.{name}",
                "must hold the longest sequence",
                size,
                remedy,
            )
        check_lora(self.lora, self.model)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning on demonstrations."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Used for validation by answering, where the validation rows have an answer."""
    train_global_batch_size: int = 32
    """Sequences per optimizer step."""
    max_num_steps: int | None = None
    """Optimizer steps; None: as num_epochs says."""
    num_epochs: int = 1
    """Passes over the data, where max_num_steps is not given."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token counts the same, or every sequence."""
    reward: str | tuple[str, ...] = "exact_match"
    """How validation answers are judged; as in GRPO."""
    reward_weights: tuple[float, ...] = ()
    """One for each of several rewards; all 1 unless given."""

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
    """Reinforcement learning from groups of responses per prompt:

    GRPO and its relatives (see --preset).
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
    """One for each of several rewards, whose weighted sum counts; all 1 unless given."""
    reduction: Reduction = "sequence_mean"
    """How tokens are weighted in the loss (constant: divided by generation.max_new_tokens, as in
    Dr. GRPO).
    """
    num_prompts_per_step: int = 32
    """Prompts per rollout batch."""
    num_generations_per_prompt: int = 8
    """Responses per prompt: the group size."""
    max_num_steps: int = 100
    """How many rollout batches are sampled and trained on."""
    train_global_batch_size: int | None = None
    """Sequences per optimizer step; a smaller number than the rollout batch gives several updates
    per batch. None: one update.
    """
    num_updates_per_batch: int = 1
    """Passes over each rollout batch."""
    dynamic_sampling: bool = False
    """DAPO: replace groups whose rewards are all equal by fresh ones, a whole group at a time."""
    max_sampling_rounds: int = 4
    """Rollout rounds after which dynamic sampling goes on with the groups that it has."""
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
        alone = (
            isinstance(self.advantage, ReinforcePlusPlusAdvantage)
            and not self.advantage.group_baseline
        )
        if isinstance(self.advantage, GroupAdvantage):
            alone = self.advantage.baseline in ("batch_mean", "none") and self.advantage.scale in (
                "batch_std",
                "none",
            )
        require(
            alone or self.num_generations_per_prompt > 1,
            "num_generations_per_prompt",
            "must be at least 2 where responses are compared within their group",
            self.num_generations_per_prompt,
            "a group of one teaches nothing; use 2 or more, or --advantage.baseline batch_mean"
            " --advantage.scale batch_std",
        )
        responses, per_step = (
            self.num_prompts_per_step * self.num_generations_per_prompt,
            self.train_global_batch_size,
        )
        require(
            per_step is None or responses % per_step == 0,
            "train_global_batch_size",
            f"must divide the {responses} responses of a rollout batch (num_prompts_per_step ·"
            " num_generations_per_prompt)",
            per_step,
            "so that every optimizer step has as many",
        )
        require(
            self.generation.temperature > 0,
            "generation.temperature",
            "must be above 0 for training",
            self.generation.temperature,
            "greedy samples of a group are all the same; 1.0 is usual",
        )
        answer = self.generation.max_new_tokens
        require(
            answer is None or answer < self.data.max_total_sequence_length,
            "generation.max_new_tokens",
            "must be below data.max_total_sequence_length",
            answer,
            f"data.max_total_sequence_length is {self.data.max_total_sequence_length}; leave room"
            " for the prompt",
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self.kl.coef > 0 or (
            isinstance(self.advantage, ReinforcePlusPlusAdvantage) and self.advantage.kl_coef > 0
        )

"""The sections that every algorithm has."""

import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from nemorl.checks import at_least, closest, is_number, refuse_unused, require, valid_seed
from nemorl.data.datasets import parts_of
from nemorl.data.rows import COLUMNS
from nemorl.data.sources import READERS, sources_of
from nemorl.parallel.config import (
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ProfileConfig,
    TrainerConfig,
    check_lora,
)
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig

WEEK_S = 604_800
"""No more than the clocks of collectives can count."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the ranks of a run on several devices are run and watched."""

    max_restarts: int = 0
    """Restarts from the last checkpoint, with new ranks, after one has died or hung."""
    timeout_s: float = 1800.0
    """Longest call of the ranks, such as an optimizer step, in seconds; then they count as hung."""
    start_timeout_s: float = 600.0
    """Longest start of a local Ray, and of the ranks, model included, in seconds."""
    cpus_per_rank: int = 1
    """CPU cores of each rank; without a GPU, its number of threads."""
    tp_across_nodes: bool = False
    """Let the devices of a parallel.tp group be on several machines, where none has enough."""
    oversubscribe: bool = False
    """Start more ranks than this machine has cores for, which then take turns: for tests."""

    def __post_init__(self) -> None:
        at_least(0, runtime__max_restarts=self.max_restarts)
        at_least(1, runtime__cpus_per_rank=self.cpus_per_rank)
        for name in ("timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            require(
                1 <= seconds <= WEEK_S,
                f"runtime.{name}",
                f"must lie in 1 … {WEEK_S}, a week",
                seconds,
                "86400 is a day",
            )


Key = TypeVar("Key", bound=Hashable)
VALIDATION = "val_"
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(
    r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A threshold of a metric that ends a run.

    >>> Condition.parse("val_accuracy >= 0.95")
    Condition(metric='val_accuracy', comparison='>=', threshold=0.95)
    >>> Condition.parse("loss<1e-2").holds(0.001), Condition.parse("loss<1e-2").holds(float("nan"))
    (True, False)
    """

    metric: str
    comparison: str
    threshold: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Return the condition that a text states. Raises ValueError if it states none."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"run.stop_when must be a metric, one of {' '.join(COMPARISONS)}, and a number, but"
                f" it is {text!r}: write it like 'val_accuracy >= 0.95'"
            )
        return cls(metric=match[1], comparison=match[2], threshold=float(match[3]))

    def holds(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.threshold)

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.threshold:g}"


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The order of checkpoints by a metric."""

    metric: str
    higher_is_better: bool | None = None

    def best(self, metrics: Mapping[Key, Mapping[str, Any]], count: int) -> list[Key]:
        """Return the keys of the `count` best finite values, best first; of equals the later."""
        higher = self.higher_is_better
        if higher is None:
            higher = not self.metric.endswith("loss")
        values = {
            key: found[self.metric]
            for key, found in metrics.items()
            if is_number(found.get(self.metric))
        }
        later_first = list(reversed(values))
        return sorted(later_first, key=values.__getitem__, reverse=higher)[:count]


@dataclass
class MetricWatch:
    field_name: str
    metric: str
    seen: bool = False

    def look(self, metrics: Mapping[str, Any], *, validation: bool) -> float | None:
        """Return the finite value in the metrics of a step or a validation, or None.

        Raises: ValueError if it is missing the first time.
        """
        if validation != self.metric.startswith(VALIDATION):
            return None
        name = self.metric.removeprefix(VALIDATION)
        if name not in metrics and not self.seen:
            known = sorted((VALIDATION if validation else "") + other for other in metrics)
            raise ValueError(
                f"{self.field_name} must name a metric that the run has, but it is"
                f" {self.metric!r}{closest(self.metric, known) or ':'} there are {', '.join(known)}"
            )
        self.seen = True
        value = metrics.get(name)
        return value if is_number(value) else None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept, when it validates and saves, and its seed."""

    dir: str | None = None
    """Directory of the run. Default: the first of runs/grpo, runs/grpo-2, … that is free."""
    resume: bool | Literal["auto"] = False
    """Continue the run in `dir` from its last checkpoint. auto: or start it, where there is none.
    """
    accept_changed_data: bool = False
    """Resume although the rows have changed."""
    seed: int = 0
    """Seed of everything random: fresh weights, the order of the data, sampling."""
    val_period: int = 0
    """Steps between validations. 0: only at the end."""
    val_at_start: bool = False
    """Validate before the first step, too."""
    max_val_samples: int = 256
    """Rows of each validation set that are used, from the top."""
    save_period: int = 50
    """Steps between checkpoints. 0: only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept: the newest, or with `metric` the best and the newest."""
    async_save: bool = False
    """Train while a checkpoint is written, from a copy in main memory (three times the weights)."""
    metric: str | None = None
    """Metric that ranks checkpoints, such as val_accuracy. The best validations get one."""
    higher_is_better: bool | None = None
    """Whether a higher `metric` is better. Default: false for a loss, true for all else."""
    stop_when: str | None = None
    """Condition that ends the run early: "val_accuracy >= 0.95", "loss < 0.1"."""
    samples_per_step: int = 8
    """Responses written to samples/ in each step: whole groups, and at least one. 0: none."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """A live table, one line a step, or nothing. auto: live in a terminal, else plain."""
    loggers: tuple[str, ...] | None = None
    """Loggers besides metrics.jsonl: tensorboard (the default, if installed), wandb, mlflow, or one
    that you registered.
    """
    project: str | None = None
    """Project of W&B, experiment of MLflow. Default: by their environment variables, or nemorl."""
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
        )
        valid_seed(run__seed=self.seed)
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
        require(
            self.metric is None or not self.async_save,
            "run.async_save",
            "can't be given together with run.metric",
            self.async_save,
            "keep one of the two",
        )
        self.stop_condition()

    def ranking(self) -> Ranking | None:
        if self.metric is None:
            return None
        return Ranking(metric=self.metric, higher_is_better=self.higher_is_better)

    def stop_condition(self) -> Condition | None:
        return None if self.stop_when is None else Condition.parse(self.stop_when)

    def require_training_metrics(self) -> None:
        for name, rule in (("metric", self.metric), ("stop_when", self.stop_when)):
            require(
                rule is None or not rule.strip().startswith(VALIDATION),
                f"run.{name}",
                "must be a metric of the training where there is no validation",
                rule,
                "give data.validation, or name a metric without val_",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and which of their columns are used."""

    train: str | tuple[str, ...] | None = None
    """Training rows: .jsonl, .json, .parquet or .csv files, or data sets on the hub (NAME or
    NAME:CONFIGURATION; columns of known ones: docs/evaluation.md).
    """
    weights: tuple[float, ...] = ()
    """Relative share of each of several training sets. Default: each row once an epoch."""
    validation: str | tuple[str, ...] | None = None
    """Rows to validate on."""
    held_out: float = 0.0
    """Training rows kept for validation without a validation set: a share (below 1) or a count."""
    split: str = "train"
    """Split of a hub data set to train on."""
    validation_split: str | None = None
    """Split of a hub data set to validate on. Default: "validation"."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    prompt_template: str | None = None
    """Text for prompts that are strings: "Question: {prompt}", or with other columns in braces."""
    system_prompt: str | None = None
    """System message put before chat messages that have none."""
    chat: bool = False
    """Give a prompt that is a string to the chat template, as the user's message."""
    response_column: str = "response"
    """Column of the demonstration (SFT)."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    messages_column: str = "messages"
    """Column of whole conversations, used for rows that have it (SFT)."""
    chosen_column: str = "chosen"
    """Column of the better answer of a pair (DPO, reward models)."""
    rejected_column: str = "rejected"
    """Column of the worse answer of a pair (DPO, reward models)."""
    margin_column: str = "margin"
    """Column of the difference by which a pair's scores should differ at least (reward models)."""
    label_column: str = "label"
    """Column that labels a single answer as desirable, true or false (KTO)."""
    environment_column: str = "environment"
    """Column that names each row's environment, where reward or rollout.environment has several."""
    environments: tuple[str, ...] = ()
    """Environment of each of several training sets, in place of the column."""
    validation_environments: tuple[str, ...] = ()
    """Environment of each validation set, in place of the column."""
    max_total_sequence_length: int = 2048
    """Longest sequence, prompt and response together, in tokens."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Longer rows are an error, dropped, or cut at the end (prompts at the beginning)."""
    shuffle: bool = True
    """Shuffle the rows again in every epoch, by run.seed."""
    streaming: bool = False
    """Read training rows as they are needed; shuffled, each is drawn among the next 10,000."""

    def __post_init__(self) -> None:
        at_least(2, data__max_total_sequence_length=self.max_total_sequence_length)
        at_least(0, data__held_out=self.held_out)
        unused = ["weights", "held_out"] * self.streaming
        refuse_unused("data", self, "is not for data.streaming", "remove it", names=unused)
        if self.prompt_template is not None:
            parts_of(self.prompt_template)

    def reading(self) -> dict[str, Any]:
        """Return the arguments of `load_rows` about what a row is."""
        columns = [f"{name}_column" for name in COLUMNS]
        names = [*columns, "prompt_template", "system_prompt", "chat"]
        return {name: getattr(self, name) for name in names}


def require_files(field_name: str, source: Any) -> None:
    """Raise ValueError if a source of rows is a missing file."""
    for path in (Path(part) for part in sources_of(source) if isinstance(part, str | Path)):
        require(
            path.suffix not in READERS or path.is_file(),
            field_name,
            "must name an existing file",
            str(path),
            f"check the path (relative to {Path.cwd()})",
        )


def require_rows(rows: object) -> None:
    """Raise ValueError where there is nothing to train on."""
    if not rows:
        raise ValueError(
            "data.train must name rows to train on: add --data.train FILE, or in Python dataset="
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The settings of rewards."""

    reward: str | tuple[str, ...] | dict[str, str | tuple[str, ...]] = "exact_match"
    """Rewards: exact_match, contains_answer, last_number, math, choice, think_format, code,
    ifeval, reasoning_gym, rm:FOLDER (a reward model), or of your own module:function or
    ./file.py:function, fn(prompt, response), with any data columns as further parameters.
    exact_match gives way to the reward of a known data set. Several are added up; a mapping has one
    for each name in the rows' column `environment`.
    """
    reward_weights: tuple[float, ...] | dict[str, tuple[float, ...]] = ()
    """Weight of each of several rewards (by name, where reward is a mapping). Default: 1."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of parameters of the rewards, by name: {tolerance: 0.01}."""


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The sections that every algorithm has; derive your own config (see `register_algorithm`)."""

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
        most, largest = self.generation.adapter_rank, self.lora.largest_rank
        require(
            not most or 0 < largest <= most,
            "generation.adapter_rank",
            f"must be 0 or as large as the largest rank of the adapters, {largest}",
            most,
            "set lora.rank, and this to the same, or remove it",
        )
        offloads = self.trainer.offload_during_generation
        for free, must in (
            (self.parallel.cpu_offload, "is not for parallel.cpu_offload, which keeps all there"),
            (not self.generation.colocated, "needs generation.colocated: others have own GPUs"),
        ):
            require(
                not (offloads and free),
                "trainer.offload_during_generation",
                must,
                offloads,
                "remove it",
            )
        require(
            self.optimizer.schedule != "constant" or not self.optimizer.min_lr_ratio,
            "optimizer.min_lr_ratio",
            "is for a schedule that decays",
            self.optimizer.min_lr_ratio,
            "add --optimizer.schedule cosine, or remove it",
        )
        require(
            not self.data.streaming or getattr(self, "max_num_steps", 1) is not None,
            "max_num_steps",
            "must be given with data.streaming, which counts no rows",
            None,
            "add --max-num-steps",
        )

    def planned_steps(self, num_rows: int) -> int | None:
        """Return the number of steps on `num_rows` rows, or None if unknown."""
        return getattr(self, "max_num_steps", None)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in each step."""
        return 1

    @property
    def head(self) -> Literal["lm", "scalar"]:
        """Last layer of the policy, as `BackendConfig.head`."""
        return "lm"

    def generates(self, *, answers: bool) -> bool:
        """Return whether a run samples; answers: whether the rows to validate on have one."""
        return hasattr(self, "reward")

    def doubts(self) -> Sequence[str]:
        """Return a sentence for each value that is allowed, but hardly meant."""
        return ()

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of a batch."""
        return self.data.max_total_sequence_length

    def require_room(self, tokens: int, what: str) -> None:
        """Refuse microbatches and packed rows that can't hold `tokens`."""
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

"""The section `run`."""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import at_least, require, valid_seed
from nemorl.runtime.config.metric_rules import VALIDATION, Condition, Ranking


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept, when it validates and saves, and its seed."""

    dir: str | None = None
    """Directory of the run. Default: the first of runs/grpo, runs/grpo-2, … that is free."""
    resume: bool | Literal["auto"] = False
    """Continue the run in `dir` from its last checkpoint. auto: or start it, where there is no run
    yet.
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
    """Train while a checkpoint is written, from a copy in main memory (three times the weights).
    Not with `metric`.
    """
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
    """Loggers besides metrics.jsonl: tensorboard, wandb, mlflow, or one that you registered.
    Default: tensorboard, if installed.
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
            "can't be given together with run.metric, which ranks checkpoints that are written",
            self.async_save,
            "keep one of the two",
        )
        self.stop_condition()

    def ranking(self) -> Ranking | None:
        """Return the order of the checkpoints, if there is a metric for it."""
        if self.metric is None:
            return None
        return Ranking(metric=self.metric, higher_is_better=self.higher_is_better)

    def stop_condition(self) -> Condition | None:
        """Return `stop_when` parsed. Raises ValueError for what is not a condition."""
        return None if self.stop_when is None else Condition.parse(self.stop_when)

    def require_training_metrics(self) -> None:
        """Raise ValueError if `metric` or `stop_when` is about a validation."""
        for name, rule in (("metric", self.metric), ("stop_when", self.stop_when)):
            require(
                rule is None or not rule.strip().startswith(VALIDATION),
                f"run.{name}",
                "must be a metric of the training where there is no validation",
                rule,
                "give data.validation, or name a metric without val_",
            )

"""The section `run`, and its rules about metrics: those of a validation begin with `val_`."""

import operator
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nemorl.checks import at_least, closest, is_number, require, valid_seed

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
    """The order of checkpoints by a metric.

    >>> found = {1: {"val_loss": 2.0}, 2: {"val_loss": 1.0}, 3: {}, 4: {"val_loss": 1.5}}
    >>> Ranking(metric="val_loss").best(found, 2)
    [2, 4]
    """

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
        return sorted(later_first, key=lambda key: values[key], reverse=higher)[:count]


class MetricWatch:
    def __init__(self, field_name: str, metric: str) -> None:
        self.field_name, self.metric = field_name, metric
        self.seen = False

    @property
    def of_validation(self) -> bool:
        return self.metric.startswith(VALIDATION)

    def look(self, metrics: Mapping[str, Any], *, validation: bool) -> float | None:
        """Return the finite value in the metrics of a step or a validation, or None.

        Raises ValueError if it is missing the first time.
        """
        if validation != self.of_validation:
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
    """Continue the run in `dir` from its last checkpoint. auto: or start it, where there is no run
    yet, or one that ended before its first checkpoint.
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
        if self.metric is None:
            return None
        return Ranking(metric=self.metric, higher_is_better=self.higher_is_better)

    def stop_condition(self) -> Condition | None:
        """Return `stop_when` parsed."""
        return None if self.stop_when is None else Condition.parse(self.stop_when)

    def require_training_metrics(self) -> None:
        """Refuse a `metric` or `stop_when` about a validation."""
        for name, rule in (("metric", self.metric), ("stop_when", self.stop_when)):
            require(
                rule is None or not rule.strip().startswith(VALIDATION),
                f"run.{name}",
                "must be a metric of the training where there is no validation",
                rule,
                "give data.validation, or name a metric without val_",
            )

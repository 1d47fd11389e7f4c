"""Rules about metrics: when a run has learned enough, and which of its checkpoints is best.

Metrics have their names of metrics.jsonl, those of the validation with `val_` before it.
"""

import math
import operator
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nemorl.checks import closest, require

Key = TypeVar("Key", bound=Hashable)
VALIDATION = "val_"
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(
    r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A threshold that ends a run once a metric has passed it.

    >>> Condition.parse("val_accuracy >= 0.95")
    Condition(metric='val_accuracy', comparison='>=', threshold=0.95)
    >>> Condition.parse("loss<1e-2").holds(0.001), Condition.parse("loss<1e-2").holds(float("nan"))
    (True, False)
    >>> Condition.parse("accuracy = 1")
    Traceback (most recent call last):
    ValueError: run.stop_when must be a metric, one of >= <= > <, and a number, ...
    """

    metric: str
    comparison: str
    threshold: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Return the condition that a text states. Raises ValueError if it states none."""
        match = _CONDITION.fullmatch(text)
        require(
            match is not None,
            "run.stop_when",
            f"must be a metric, one of {' '.join(COMPARISONS)}, and a number",
            text,
            "write it like 'val_accuracy >= 0.95'",
        )
        assert match is not None
        return cls(metric=match[1], comparison=match[2], threshold=float(match[3]))

    def holds(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.threshold)

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.threshold:g}"


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The order of checkpoints by a metric: by default less of a loss is better, more of all else.

    >>> found = {1: {"val_loss": 2.0}, 2: {"val_loss": 1.0}, 3: {}, 4: {"val_loss": 1.5}}
    >>> Ranking(metric="val_loss").best(found, 2)
    [2, 4]
    """

    metric: str
    higher_is_better: bool | None = None

    def best(self, metrics: Mapping[Key, Mapping[str, Any]], count: int) -> list[Key]:
        """Return the keys of the `count` best, the best first; of equals the later.

        Keys without a finite value of the metric are not among them.
        """
        higher = (
            not self.metric.endswith("loss")
            if self.higher_is_better is None
            else self.higher_is_better
        )
        values = {
            key: found[self.metric]
            for key, found in metrics.items()
            if _is_number(found.get(self.metric))
        }
        places = {key: place for place, key in enumerate(values)}
        return sorted(
            values,
            key=lambda key: (values[key] if higher else -values[key], places[key]),
            reverse=True,
        )[:count]


class MetricWatch:
    """Picks one metric out of those that a run measures."""

    def __init__(self, field_name: str, metric: str) -> None:
        self.field_name, self.metric = field_name, metric
        self.seen = False

    @property
    def of_validation(self) -> bool:
        return self.metric.startswith(VALIDATION)

    def look(self, metrics: Mapping[str, Any], *, validation: bool) -> float | None:
        """Return the value in the metrics of a step or of a validation (there without `val_`).

        None if the metric belongs to the other. Raises ValueError if it is missing the first time.
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
        return value if _is_number(value) else None


def require_validation(rules: Mapping[str, str | None], *, validates: bool) -> None:
    """Raise ValueError if a rule, given by field and metric, needs a validation and there is none.

    >>> require_validation({"run.metric": "val_loss"}, validates=False)
    Traceback (most recent call last):
    ValueError: run.metric must be a metric of the training where there is no validation, ...
    """
    for name, metric in rules.items():
        require(
            validates or metric is None or not metric.startswith(VALIDATION),
            name,
            "must be a metric of the training where there is no validation",
            metric,
            "give data.validation, or name a metric without val_",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

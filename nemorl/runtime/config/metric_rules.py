"""Rules about metrics: when a run has learned enough, and which of its checkpoints is best.

Metrics of the validation have `val_` before their names of metrics.jsonl.
"""

import operator
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nemorl.checks import closest, is_number

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
    """Picks one metric out of all that a run measures."""

    def __init__(self, field_name: str, metric: str) -> None:
        self.field_name, self.metric = field_name, metric
        self.seen = False

    @property
    def of_validation(self) -> bool:
        return self.metric.startswith(VALIDATION)

    def look(self, metrics: Mapping[str, Any], *, validation: bool) -> float | None:
        """Return the finite value in the metrics of a step or of a validation (there without
        `val_`), or None. Raises ValueError if it is missing the first time.
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

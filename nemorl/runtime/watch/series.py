"""The course of a metric over a run, as the plots and the report draw it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Series = tuple[list[int], list[float]]
"""Steps and values."""


def series_of(records: Iterable[Mapping[str, Any]], metric: str, phase: str) -> Series:
    """A metric's finite values in the lines of metrics.jsonl.

    >>> series_of([{"step": 1, "phase": "train", "loss": 2.0}, {"step": 2, "phase": "train", "loss": None}], "loss", "train")
    ([1], [2.0])
    """
    points = [
        (record["step"], record[metric])
        for record in records
        if record.get("phase") == phase
        and isinstance(record.get("step"), int)
        and is_number(record.get(metric))
    ]
    return [step for step, _ in points], [value for _, value in points]


def is_number(value: Any) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: list[float], *, width: float) -> list[float]:
    """Each value's surroundings in a mean with Gaussian weights of standard deviation `width`, in
    steps.

    >>> smooth([1.0, 1.0, 1.0], width=2.0)
    [1.0, 1.0, 1.0]
    >>> [round(value, 2) for value in smooth([0.0, 0.0, 4.0, 0.0, 0.0], width=0.5)]
    [0.0, 0.43, 3.15, 0.43, 0.0]
    """
    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)

    def weighted(array: np.ndarray) -> np.ndarray:
        return np.convolve(array, kernel)[reach : reach + len(array)]

    return (weighted(np.asarray(values)) / weighted(np.ones(len(values)))).tolist()


def thin(series: Series, most: int) -> Series:
    """At most `most` points, each the mean of equally many neighbours (the last of fewer).

    >>> thin(([1, 2, 3, 4, 5], [0.0, 1.0, 2.0, 3.0, 4.0]), 3)
    ([1, 3, 5], [0.5, 2.5, 4.0])
    """
    steps, values = series
    per_point = -(-len(steps) // most)
    if per_point <= 1:
        return series
    starts = range(0, len(steps), per_point)
    parts = [
        (steps[start : start + per_point], values[start : start + per_point]) for start in starts
    ]
    return [part[(len(part) - 1) // 2] for part, _ in parts], [
        sum(part) / len(part) for _, part in parts
    ]

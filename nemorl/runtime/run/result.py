"""What a run returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from nemorl.runtime.run.directory import RunDirectory


@dataclass(frozen=True)
class TrainResult:
    """The result of a run in memory, in every process under torchrun."""

    metrics: dict[str, float]
    """Of the last step, and of the last validation as val_…"""
    history: list[dict[str, Any]] = field(repr=False)
    """The lines of metrics.jsonl, of steps and validations."""
    paths: RunDirectory
    """Where the rest is: paths.path, paths.hf, paths.metrics, paths.plots, paths.checkpoints, …"""
    model: nn.Module | None = field(repr=False)
    """The trained model, live; None where it was spread over ranks: load it from paths.hf."""
    tokenizer: Any = field(repr=False)


def final_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last step's metrics, and the last validation's with `val_` before their names.

    >>> train = {"step": 1, "phase": "train", "loss": 2.0}
    >>> final_metrics([train, {"step": 1, "phase": "validation", "accuracy": 0.5}])
    {'loss': 2.0, 'val_accuracy': 0.5}
    """
    last = {line["phase"]: line for line in history}
    return {
        prefix + name: value
        for phase, prefix in (("train", ""), ("validation", "val_"))
        for name, value in last.get(phase, {}).items()
        if name not in ("step", "time", "phase")
    }

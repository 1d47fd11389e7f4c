"""What a run returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import nn

from nemorl.runtime.store.directory import RunDirectory


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The result of a run in memory, in every process under torchrun."""

    metrics: dict[str, float]
    """Metrics of the last step, and of the last validation as val_…"""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl, of steps and validations."""
    paths: RunDirectory
    """Where the rest is: paths.path, paths.hf, paths.metrics, paths.plots, paths.checkpoints, …"""
    model: nn.Module | None
    """The trained model, live; None where it was spread over ranks: load it from paths.hf."""
    tokenizer: Any

    def _shown(self) -> dict[str, str]:
        step = max((line["step"] for line in self.history), default=0)
        first = [name for name in SHOWN if name in self.metrics]
        return {"step": str(step)} | {name: f"{self.metrics[name]:.3g}" for name in first}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self._shown().items())
        return f"TrainResult({values}, path={str(self.paths.path)!r})"

    def _repr_html_(self) -> str:
        return html_table("TrainResult", {**self._shown(), "path": self.paths.path})


SHOWN = ("reward", "val_reward", "accuracy", "val_accuracy", "loss", "val_loss")
"""The metrics that a result shows of itself, if it has them; all are in `metrics`."""


def html_table(title: str, values: Mapping[str, Any]) -> str:
    """Return names and values as a table for a notebook.

    >>> html_table("Run", {"lr": 0.1})
    '<b>Run</b><table><tr><td>lr</td><td>0.1</td></tr></table>'
    """
    rows = (
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<b>{escape(title)}</b><table>{''.join(rows)}</table>"


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

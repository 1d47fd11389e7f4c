"""metrics.jsonl and samples/: the record that nemorl itself reads, always written."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.runtime.run.directory import Phase
from nemorl.runtime.watch.loggers.base import LoggedRun


class JsonlLogger:
    """Writes metrics.jsonl and samples/."""

    def __init__(self, run: LoggedRun) -> None:
        self.directory = run.directory

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        self.directory.append_metrics(step, metrics, phase=phase)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.directory.append_samples(step, samples)

    def close(self, *, finished: bool) -> None:
        """Do nothing: every line has been written."""

"""The interface of a logger, and the callback that drives all of a run's loggers.

One of your own is made with a `LoggedRun`, has the methods of `MetricLogger`, and becomes
`run.loggers mine` with `register_logger("mine")`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.signals import update_in_progress
from nemorl.runtime.store.directory import Phase, RunDirectory
from nemorl.runtime.store.files import NotWritten
from nemorl.runtime.store.state import Run
from nemorl.warn import warn


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger knows of the run when it is made, just before the first step."""

    directory: RunDirectory
    """The run's directory; its name is the run's name."""
    run_id: str
    """The same after a resume: a logger that finds a run with this id continues it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings, nested as in config.yaml."""
    project: str | None = None
    """`run.project`: what W&B calls project and MLflow experiment."""
    first_step: int = 0
    """Steps that are done already: after a resume, later ones are written again."""
    samples_per_step: int = 8


@runtime_checkable
class MetricLogger(Protocol):
    """Records a run."""

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step ("train"), or a validation of the weights after it ("validation")."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record a few responses of a step, or do nothing; see `Callback.on_samples`."""

    def close(self, *, finished: bool) -> None:
        """End the record; `finished` is False where the run ended with an error."""


LoggerFactory = Callable[[LoggedRun], MetricLogger]


class JsonlLogger:
    """Writes metrics.jsonl and samples/, the record that nemorl itself reads."""

    def __init__(self, run: LoggedRun) -> None:
        self.directory = run.directory

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        self.directory.append_metrics(step, metrics, phase=phase)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.directory.append_samples(step, samples)

    def close(self, *, finished: bool) -> None:
        """Do nothing: every line has been written."""


class Recorder(Callback):
    """Hand metrics and samples to every logger.

    One that fails to open ends the run before its first step; later it is warned of once.
    """

    def __init__(self, factories: Mapping[str, LoggerFactory], run: LoggedRun) -> None:
        self.factories, self.run = factories, run
        self.loggers: dict[str, MetricLogger] = {}
        self.failed: set[str] = set()
        self.finished = False

    def on_train_begin(self, trainer: Run) -> None:
        run = replace(self.run, first_step=trainer.state.step)
        for name, make in self.factories.items():
            self.loggers[name] = make(run)

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda logger: logger.log("train", step, metrics))

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda logger: logger.log("validation", step, metrics))

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        failed = [sample for sample in samples if "failure" in sample]
        samples = [sample for sample in samples if "failure" not in sample]
        groups = [sample.get("group", place) for place, sample in enumerate(samples)]
        ends = [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]] + [len(groups)]
        limit = self.run.samples_per_step
        end = max((end for end in ends if end <= limit), default=ends[0])  # a group stays whole
        if limit and (kept := samples[:end] + failed):
            self._each(lambda logger: logger.log_samples(step, kept))

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        self.finished = True

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self.finished = False  # a later callback may fail at the end

    def close(self) -> None:
        self._each(lambda logger: logger.close(finished=self.finished))
        self.loggers = {}

    def _each(self, call: Callable[[MetricLogger], None]) -> None:
        with update_in_progress():  # a signal waits until a record is whole
            for name, logger in self.loggers.items():
                try:
                    call(logger)
                except Exception as error:
                    if name not in self.failed:
                        why = str(error) if isinstance(error, NotWritten) else repr(error)
                        warn(
                            f"the logger {name} failed, and the run continues without this record:"
                            f" {why}",
                        )
                    self.failed.add(name)

"""Where a run's metrics go: one small interface, and the callback that drives everything that keeps
it.

The files of the run's own directory are always written (jsonl.py); `run.loggers` names what is
written besides. A logger of your own is a class that is made with a `LoggedRun` and has the verbs
of `MetricLogger`; `register_logger("mine")` makes it known as `run.loggers mine`.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import require
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import Phase, RunDirectory
from nemorl.runtime.run.state import Run
from nemorl.runtime.start.registry import get_logger


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger is told of the run when it is made, just before the first step."""

    directory: RunDirectory
    """The run's directory; its name is the run's name."""
    run_id: str
    """Short and unique, the same after a resume: a logger that finds a run with this id goes on
    with it.
    """
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings, nested as in config.yaml."""
    project: str | None = None
    """`run.project`: what W&B calls project and MLflow experiment."""
    first_step: int = 0
    """Steps that are done already: after a resume, whatever a logger has of later ones is written
    again.
    """
    samples_per_step: int = 8
    """How many responses of a step are kept."""


@runtime_checkable
class MetricLogger(Protocol):
    """What records a run. A logger that has no place for samples does nothing with them."""

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured in a step ("train") or in a validation of the weights after it ("validation")."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few responses of a step; see `Callback.on_samples`."""

    def close(self, *, finished: bool) -> None:
        """The last call. `finished` is False where the run ended with an error."""


LoggerFactory = Callable[[LoggedRun], MetricLogger]


class Recorder(Callback):
    """Hands metrics and samples to every logger. One that fails to open ends the run before its
    first step; one that fails later is a warning.

    A record that is lost is worth less than the training that it shows: the run goes on, with one
    warning a logger and a count at the end.
    """

    def __init__(self, factories: Mapping[str, LoggerFactory], run: LoggedRun) -> None:
        self.factories, self.run = factories, run
        self.loggers: dict[str, MetricLogger] = {}
        self.lost: dict[str, int] = {}
        self.finished = False
        self.untold: tuple[Callable[[MetricLogger], None], dict[str, MetricLogger]] | None = None

    def on_train_begin(self, trainer: Run) -> None:
        self.close()
        self.lost, self.finished = {}, False
        run = replace(self.run, first_step=trainer.state.step)
        for name, make in self.factories.items():
            self.loggers[name] = make(run)

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._tell(lambda logger: logger.log("train", step, metrics))

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._tell(lambda logger: logger.log("validation", step, metrics))

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        kept = samples[: self.run.samples_per_step]
        if kept:
            self._tell(lambda logger: logger.log_samples(step, kept))

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        self.finished = True

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """An interrupt in the midst of a record: it is written all the same, since a checkpoint of
        its step may follow.
        """
        if self.untold is not None:
            self._tell(*self.untold)

    def close(self) -> None:
        loggers, self.loggers = self.loggers, {}
        self._tell(lambda logger: logger.close(finished=self.finished), loggers)
        for name, count in self.lost.items():
            if count > 1:
                warnings.warn(
                    f"the logger {name} has missed {count} records of {self.run.directory.path}",
                    stacklevel=2,
                )
        self.lost = {}

    def _tell(
        self,
        verb: Callable[[MetricLogger], None],
        loggers: Mapping[str, MetricLogger] | None = None,
    ) -> None:
        waiting = dict(self.loggers if loggers is None else loggers)
        self.untold = (verb, waiting)
        for name in list(waiting):
            try:
                verb(waiting[name])
            except Exception as error:
                self.lost[name] = self.lost.get(name, 0) + 1
                if self.lost[name] == 1:
                    warnings.warn(
                        f"the logger {name} failed, and the run goes on without this record:"
                        f" {error!r}",
                        stacklevel=2,
                    )
            del waiting[name]
        self.untold = None


def chosen_loggers(names: Sequence[str] | None) -> dict[str, LoggerFactory]:
    """The loggers that `run.loggers` names, and the files of the run's directory before them; None:
    TensorBoard where it is installed.

    Raises ValueError that names the setting for a name that nobody registered, or whose package is
    missing.
    """
    from nemorl.runtime.watch.loggers.jsonl import JsonlLogger

    if names is None:
        names = ("tensorboard",) if installed("tensorboard") else ()
    doubled = sorted({name for name in names if list(names).count(name) > 1})
    require(
        not doubled,
        "run.loggers",
        "must name each logger once",
        list(names),
        f"leave out the second {', '.join(doubled)}",
    )
    return {"jsonl": JsonlLogger} | {name: get_logger(name) for name in needing_packages(names)}


def needing_packages(names: Iterable[str]) -> list[str]:
    """The same names, once it is sure that their packages are there."""
    names = list(names)
    for name in names:
        if name in PACKAGES and not installed(PACKAGES[name]):
            missing = f"because the package {PACKAGES[name]} is not installed"
            raise ValueError(
                f"run.loggers can't name {name}, {missing}: pip install 'nemorl[loggers]', or leave"
                " it out"
            )
    return names


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Logger → the package that it can't do without."""


def installed(package: str) -> bool:
    """Whether there is such a package.

    A folder of that name in the working directory, such as W&B's own `wandb/`, is none.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None

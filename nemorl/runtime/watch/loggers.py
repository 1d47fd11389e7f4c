"""The interface of a logger, and the callback that drives all of a run's loggers.

One of your own is made with a `LoggedRun`, has the methods of `MetricLogger`, and becomes
`run.loggers mine` with `register_logger("mine")`.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import warn
from nemorl.runtime.config.tree import flat
from nemorl.runtime.store.directory import Phase, RunDirectory
from nemorl.runtime.store.files import NotWritten, writing
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback, update_in_progress


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger knows of the run, just before the first step."""

    directory: RunDirectory
    run_id: str
    """The same after a resume: a logger continues the run of this id."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings, nested as in config.yaml."""
    project: str | None = None
    """`run.project`: W&B's project, MLflow's experiment."""
    first_step: int = 0
    """Steps done already: after a resume, later ones are written again."""
    samples_per_step: int = 8


@runtime_checkable
class MetricLogger(Protocol):
    """Records a run."""

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step ("train"), or a validation after it ("validation")."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record a few responses of a step, or do nothing; see `Callback.on_samples`."""

    def close(self, *, finished: bool) -> None:
        """End the record; `finished` is False after an error."""


LoggerFactory = Callable[[LoggedRun], MetricLogger]


class JsonlLogger(MetricLogger):
    """Writes metrics.jsonl and samples/, which nemorl reads."""

    def __init__(self, run: LoggedRun) -> None:
        self.directory = run.directory

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        self.directory.append_metrics(step, metrics, phase=phase)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.directory.append_samples(step, samples)


class Recorder(Callback):
    """Hand metrics and samples to every logger; one that fails is warned of once."""

    def __init__(self, factories: Mapping[str, LoggerFactory], run: LoggedRun) -> None:
        self.factories, self.run = factories, run
        self.loggers: dict[str, MetricLogger] = {}
        self.failed: set[str] = set()
        self.finished = False

    def on_train_begin(self, trainer: RunView) -> None:
        run = replace(self.run, first_step=trainer.state.step)
        self.loggers = {name: make(run) for name, make in self.factories.items()}

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda logger: logger.log("train", step, metrics))

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda logger: logger.log("validation", step, metrics))

    def on_samples(self, trainer: RunView, step: int, samples: list[dict[str, Any]]) -> None:
        failed = [sample for sample in samples if "failure" in sample]
        samples = [sample for sample in samples if "failure" not in sample]
        groups = [sample.get("group", place) for place, sample in enumerate(samples)]
        ends = [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]] + [len(groups)]
        limit = self.run.samples_per_step
        end = max((end for end in ends if end <= limit), default=ends[0])  # a group stays whole
        if limit and (kept := samples[:end] + failed):
            self._each(lambda logger: logger.log_samples(step, kept))

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        self.finished = True

    def on_exception(self, trainer: RunView, error: BaseException) -> None:
        self.finished = False

    def close(self) -> None:
        self._each(lambda logger: logger.close(finished=self.finished))
        self.loggers = {}

    def _each(self, call: Callable[[MetricLogger], None]) -> None:
        with update_in_progress():  # a signal waits
            for name, logger in self.loggers.items():
                try:
                    call(logger)
                except Exception as error:
                    if name not in self.failed:
                        why = error if isinstance(error, NotWritten) else repr(error)
                        warn(f"the logger {name} failed, and the run continues without it: {why}")
                    self.failed.add(name)


RUN_ID_TAG = "nemorl.run_id"


class TensorBoardLogger(MetricLogger):
    """A run in TensorBoard: scalars as train/… and validation/…; a resume hides later ones."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.directory.tensorboard
        with writing("TensorBoard's events", self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=run.first_step + 1)

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        with writing("TensorBoard's events", self.folder):
            for name, value in metrics.items():
                self.writer.add_scalar(f"{phase}/{name}", value, step)

    def close(self, *, finished: bool) -> None:
        self.writer.close()


class WandbLogger:
    """A run on Weights & Biases (`wandb login`, or WANDB_MODE=offline and later `wandb sync`):
    metrics as train/… and validation/…, samples as tables.

    A resumed run keeps its address; the axis is our `step`, as W&B's own never decreases.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        directory = run.directory
        try:
            self.run = wandb.init(
                project=run.project or os.environ.get("WANDB_PROJECT") or "nemorl",
                name=directory.name,
                id=run.run_id,
                resume="allow",
                dir=directory.path,
                config=dict(run.config),
                settings=wandb.Settings(console="off", quiet=True),  # the display has the terminal
            )
        except wandb.Error as error:
            raise ValueError(
                f"run.loggers names wandb, but Weights & Biases can't start a run ({error}): log in"
                " with `wandb login`, set WANDB_MODE=offline, or remove wandb from run.loggers"
            ) from error
        for phase in ("train", "validation"):
            self.run.define_metric(f"{phase}/*", step_metric="step")
        self.last_table = -float("inf")

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step} | {f"{phase}/{name}": x for name, x in metrics.items()})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        now = time.monotonic()
        if now - self.last_table >= 60:  # as each table is a file
            self.last_table = now
            values = [item for sample in samples for item in sample.items()]
            plain = {key: 0 for key, value in values if isinstance(value, str | int | float)}
            rows = [[sample.get(key) for key in plain] for sample in samples]
            self.run.log({"step": step, "samples": wandb.Table(columns=[*plain], data=rows)})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MlflowLogger(MetricLogger):
    """A run in MLflow (see MLFLOW_TRACKING_URI): metrics as train/… and validation/…, settings
    as parameters, config.yaml as an artifact. A run tagged with our id is continued.
    """

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self.metric = Metric
        try:
            self.client = MlflowClient()
            name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "nemorl"
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            tagged = f"tags.`{RUN_ID_TAG}` = '{run.run_id}'"
            if found := self.client.search_runs([experiment], tagged, max_results=1):
                self.id = found[0].info.run_id
                self.client.set_terminated(self.id, "RUNNING")
            else:
                self.id = self.client.create_run(
                    experiment, run_name=run.directory.name, tags={RUN_ID_TAG: run.run_id}
                ).info.run_id
                settings = [Param(key, str(value)[:500]) for key, value in flat(run.config).items()]
                self.client.log_batch(self.id, params=settings)
            if run.directory.config.exists():
                self.client.log_artifact(self.id, str(run.directory.config))
        except MlflowException as error:
            raise ValueError(
                f"run.loggers names mlflow, but MLflow can't start a run ({error}): check"
                " MLFLOW_TRACKING_URI, or remove mlflow from run.loggers"
            ) from error

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        found = [self.metric(f"{phase}/{n}", float(x), now, step) for n, x in named.items()]
        self.client.log_batch(self.id, found)

    def close(self, *, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")

"""Loggers for TensorBoard, Weights & Biases and MLflow, each imported when it is used."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.runtime.config.tree import flat
from nemorl.runtime.store.directory import Phase
from nemorl.runtime.store.files import writing
from nemorl.runtime.watch.loggers.base import LoggedRun

SECONDS_BETWEEN_TABLES = 60.0
"""Every table of samples is a file."""
RUN_ID_TAG = "nemorl.run_id"


class TensorBoardLogger:
    """A run in TensorBoard: scalars as train/… and validation/… that hide those before a resume."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.directory.tensorboard
        with writing("TensorBoard's events", self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=run.first_step + 1)

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        with writing("TensorBoard's events", self.folder):
            for name, value in metrics.items():
                self.writer.add_scalar(f"{phase}/{name}", value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: `nemorl report` shows them."""

    def close(self, *, finished: bool) -> None:
        with writing("TensorBoard's events", self.folder):
            self.writer.close()


class WandbLogger:
    """A run on Weights & Biases (`wandb login`, or WANDB_MODE=offline and later `wandb sync`):
    metrics as train/… and validation/…, samples as tables, the settings as config.

    The run's id is ours, so that a resumed run keeps its address. Our `step` is the axis, as W&B's
    own never decreases.
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
        self.run.log(
            {"step": step, **{f"{phase}/{name}": value for name, value in metrics.items()}}
        )

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        now = time.monotonic()
        if now - self.last_table >= SECONDS_BETWEEN_TABLES:
            self.last_table = now
            values = [item for sample in samples for item in sample.items()]
            plain = {key: 0 for key, value in values if isinstance(value, str | int | float)}
            rows = [[sample.get(key) for key in plain] for sample in samples]
            self.run.log({"step": step, "samples": wandb.Table(columns=[*plain], data=rows)})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MlflowLogger:
    """A run on an MLflow server, or in a local file, as MLFLOW_TRACKING_URI says: metrics as
    train/… and validation/…, the settings as parameters, config.yaml as an artifact. A run of the
    experiment that is tagged with our id is continued.
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
                settings = flat(run.config).items()
                parameters = [Param(key, str(value)[:500]) for key, value in settings]
                self.client.log_batch(self.id, params=parameters)
            if run.directory.config.exists():
                self.client.log_artifact(self.id, str(run.directory.config))
        except MlflowException as error:
            raise ValueError(
                f"run.loggers names mlflow, but MLflow can't start a run ({error}): check"
                " MLFLOW_TRACKING_URI, or remove mlflow from run.loggers"
            ) from error

    def log(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {valid_name(f"{phase}/{name}"): float(value) for name, value in metrics.items()}
        found = [self.metric(name, value, now, step) for name, value in named.items()]
        self.client.log_batch(self.id, found)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: MLflow has no place for them."""

    def close(self, *, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")


def valid_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow accepts.

    >>> valid_name("train/reward/<lambda>")
    'train/reward/_lambda_'
    """
    return re.sub(r"[^\w\-. /]", "_", name)

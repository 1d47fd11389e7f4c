"""A run on an MLflow tracking server, or in a local file: MLFLOW_TRACKING_URI says where."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.runtime.config.tree import flat
from nemorl.runtime.store.directory import Phase
from nemorl.runtime.watch.loggers.base import LoggedRun

RUN_ID_TAG = "nemorl.run_id"


class MlflowLogger:
    """Write metrics as train/… and validation/…, the settings as parameters, config.yaml as an
    artifact. A run of the experiment that is tagged with our id is continued.
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

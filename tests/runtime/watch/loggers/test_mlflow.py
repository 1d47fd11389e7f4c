"""MLflow without a server: the real client on its local database."""

import json

import pytest
from mlflow import MlflowClient

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import closing
from nemorl.runtime.watch.loggers import LoggedRun, MlflowLogger
from tests.runtime.runs import grpo_config, start
from tests.runtime.tiny import recorder, walk


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    """One for all tests: MLflow takes seconds to make one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def local(database, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def runs_of(project: str) -> list:
    client = MlflowClient()
    return client.search_runs([client.get_experiment_by_name(project).experiment_id])


@pytest.mark.slow
def test_a_run_in_a_local_file(tmp_path):
    options = {"loggers": ("mlflow",), "project": "arithmetic"}
    start(grpo_config(tmp_path / "sums", steps=2, run=options))
    (run,) = runs_of("arithmetic")
    assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
    assert run.data.params["optimizer.lr"] == "0.01" and run.data.params["max_num_steps"] == "2"
    record = json.loads((tmp_path / "sums" / "run.json").read_text())
    assert run.data.tags["nemorl.run_id"] == record["run_id"]
    client = MlflowClient()
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [metric.step for metric in history] == [1, 2]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


@pytest.mark.slow
def test_a_resumed_run_goes_on(directory):
    for steps, end, status in ((range(1, 4), False, "FAILED"), (range(2, 5), True, "FINISHED")):
        callback = recorder(directory, mlflow=MlflowLogger)
        with closing([callback]):
            walk(callback, steps, end=end)
        (run,) = runs_of("nemorl")
        assert run.info.status == status
    assert run.data.metrics["train/loss"] == 0.25
    history = MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert {metric.step for metric in history} == {1, 2, 3, 4}


def logged(tmp_path, **options) -> LoggedRun:
    directory = RunDirectory.create(tmp_path / "run", "")
    return LoggedRun(directory=directory, run_id="3f9a01bd", **options)


def test_names_and_values_that_mlflow_would_refuse(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-outside")
    config = {"section": {f"key{index}": "x" * 9000 for index in range(150)}}
    logger = MlflowLogger(logged(tmp_path, config=config))
    metrics = {"reward/<lambda>": 1.0, "loss": float("nan"), "grad_norm": float("inf")}
    logger.log("train", 1, metrics)
    logger.close(finished=True)
    (run,) = runs_of("from-outside")
    assert run.data.metrics["train/reward/_lambda_"] == 1.0 and len(run.data.params) == 150


def test_a_server_that_refuses_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"run\.loggers names mlflow, but.*MLFLOW_TRACKING_URI"):
        MlflowLogger(logged(tmp_path))

import os
import signal
from types import SimpleNamespace

import pytest

import nemorl
from nemorl.runtime.run import registry
from nemorl.runtime.run.registry import chosen_loggers
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import closing, notify, signals_raise
from nemorl.runtime.watch.loggers import JsonlLogger
from tests.runtime.runs import grpo_config, start
from tests.runtime.tiny import recorder, tiny_run, walk


class Memory:
    """A logger that keeps what it is told, and fails where it is told to."""

    def __init__(self, run, fail_from: int | None = None):
        self.run, self.fail_from = run, fail_from
        self.heard: list[tuple] = []

    def log(self, phase, step, metrics):
        if self.fail_from is not None and step >= self.fail_from:
            raise OSError("no space left")
        self.heard.append((phase, step, dict(metrics)))

    def log_samples(self, step, samples):
        self.heard.append(("samples", step, len(samples)))

    def close(self, *, finished):
        self.heard.append(("close", finished))


def test_every_logger_hears_everything_and_how_it_ended(directory):
    made: list[Memory] = []
    for first, end in ((1, True), (4, False)):
        callback = recorder(directory, memory=lambda run: made.append(Memory(run)) or made[-1])
        with closing([callback]):
            walk(callback, range(first, first + 2), end=end)
    whole, broken = made
    assert whole.heard == [
        ("samples", 1, 8), ("train", 1, {"loss": 1.0}), ("validation", 1, {"loss": 2.0}),
        ("samples", 2, 8), ("train", 2, {"loss": 0.5}), ("validation", 2, {"loss": 1.0}),
        ("close", True),
    ]  # fmt: skip
    assert broken.heard[-1] == ("close", False), "a run that did not come to its end"
    assert (whole.run.first_step, broken.run.first_step) == (0, 3), "where a resumed run begins"


def test_failed_conversations_are_kept_beside_the_groups(directory):
    callback = recorder(directory)
    notify([callback], "on_train_begin", tiny_run())
    samples = [{"prompt": str(index)} for index in range(12)] + [{"failure": "KeyError"}] * 2
    notify([callback], "on_samples", tiny_run(step=1), 1, samples)
    notify([callback], "on_samples", tiny_run(step=2), 2, samples[12:])
    written = [directory.read_samples([step])[step] for step in (1, 2)]
    assert written == [samples[:8] + samples[12:], samples[12:]]


def test_a_logger_that_fails_loses_its_own_records_only(directory):
    made: list[Memory] = []
    callback = recorder(
        directory, memory=lambda run: made.append(Memory(run, fail_from=2)) or made[-1]
    )
    failed = pytest.warns(UserWarning, match="memory failed, .*no space left")
    with failed as caught, closing([callback]):
        walk(callback, range(1, 5))
    assert len(caught) == 1, "one warning, however many records"
    assert len(directory.read_metrics()) == 8
    assert made[0].heard[-1] == ("close", True)


def test_an_interrupt_in_the_midst_of_a_record_loses_none(directory, monkeypatch):
    append = RunDirectory.append_metrics

    def interrupted(*args, **keywords):
        os.kill(os.getpid(), signal.SIGINT)
        append(*args, **keywords)

    monkeypatch.setattr(RunDirectory, "append_metrics", interrupted)
    callback = recorder(directory)
    notify([callback], "on_train_begin", tiny_run())
    with signals_raise(), pytest.raises(KeyboardInterrupt):
        notify([callback], "on_step_end", tiny_run(step=1), 1, {"loss": 0.5})
    assert [line["loss"] for line in directory.read_metrics()] == [0.5]


def test_chosen_loggers(monkeypatch):
    assert list(chosen_loggers(None)) == ["jsonl", "tensorboard"]
    assert list(chosen_loggers(())) == ["jsonl"]
    monkeypatch.setattr(registry, "installed", lambda package: True)
    assert chosen_loggers(("mlflow", "wandb"))["jsonl"] is JsonlLogger
    monkeypatch.setattr(registry, "installed", lambda package: False)
    assert list(chosen_loggers(None)) == ["jsonl"]
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ValueError, match=rf"name {name}, because.*pip install 'nemorl"):
            chosen_loggers((name,))


def test_a_folder_is_no_package(monkeypatch):
    """W&B leaves a folder `wandb` where it runs, and Python takes a folder for a package."""
    monkeypatch.setattr(registry, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert not registry.installed("wandb")


def test_a_logger_of_ones_own(tmp_path, monkeypatch):
    made: list[Memory] = []
    monkeypatch.setattr(registry, "LOGGERS", dict(registry.LOGGERS))

    @nemorl.register_logger("memory")
    def make(run):
        made.append(Memory(run))
        return made[-1]

    options = {"loggers": ("memory",), "project": "sums", "samples_per_step": 3}
    start(grpo_config(tmp_path / "run", steps=2, run=options))
    heard, run = made[0].heard, made[0].run
    assert [entry[0] for entry in heard] == ["samples", "train", "samples", "train", "close"]
    assert heard[0] == ("samples", 1, 4), "one whole group, though there is room for three"
    assert (run.project, run.config["max_num_steps"], len(run.run_id)) == ("sums", 2, 8)

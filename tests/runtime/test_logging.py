import importlib.util

import pytest

from nemorl.runtime import checkpoint, plots
from nemorl.runtime.callbacks import Callback, closing, notify
from nemorl.runtime.logging import CheckpointCallback, JsonlLogger, PlotCallback, SampleLogger, TensorBoardLogger, tensorboard_logger
from nemorl.runtime.run_directory import RunDirectory, read_lines
from tests.runtime.tiny import tiny_run


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "")


def steps_of(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.glob("step_*"))


def walk(callbacks: list[Callback], steps: range) -> None:
    """A run that does nothing but notify."""
    notify(callbacks, "on_train_begin", tiny_run(step=steps.start - 1))
    for step in steps:
        notify(callbacks, "on_step_end", tiny_run(step=step), step, {"loss": 1 / step})
    notify(callbacks, "on_train_end", tiny_run(step=steps.stop - 1), {})


def test_metrics_and_samples_are_written(directory):
    callbacks = [JsonlLogger(directory), SampleLogger(directory, limit=2)]
    walk(callbacks, range(1, 3))
    notify(callbacks, "on_validation_end", tiny_run(step=2), 2, {"accuracy": 0.5})
    notify(callbacks, "on_samples", tiny_run(step=2), 2, [{"prompt": str(index)} for index in range(5)])
    notify(callbacks, "on_samples", tiny_run(step=2), 3, [])
    assert [(line["step"], line["phase"]) for line in directory.read_metrics()] == [(1, "train"), (2, "train"), (2, "validation")]
    assert read_lines(directory.samples / "step_2.jsonl") == [{"prompt": "0"}, {"prompt": "1"}]
    assert read_lines(directory.samples / "step_3.jsonl") == []


@pytest.mark.parametrize(
    ("period", "steps", "expected"),
    [
        (0, range(1, 6), ["step_5"]),
        (2, range(1, 6), ["step_2", "step_4", "step_5"]),
        (2, range(1, 5), ["step_2", "step_4"]),
        (2, range(3, 4), ["step_3"]),
        (2, range(3, 3), []),
    ],
)
def test_checkpoints_come_by_period_and_at_the_end(directory, period, steps, expected):
    walk([CheckpointCallback(directory, period=period, keep=9)], steps)
    assert steps_of(directory) == expected


def test_checkpoint_at_the_end_is_not_written_twice(directory, monkeypatch):
    written = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **keywords: written.append(1) or save(*arguments, **keywords))
    walk([CheckpointCallback(directory, period=2)], range(1, 5))
    assert len(written) == 2


def test_observers_hear_of_checkpoints(directory):
    heard = []

    class Listener(Callback):
        def on_checkpoint(self, trainer, step, path):
            heard.append((step, path))

    walk([CheckpointCallback(directory, observers=(Listener(),))], range(1, 4))
    assert heard == [(3, directory.checkpoints / "step_3")]


def test_tensorboard_events_of_repeated_steps_are_hidden(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(1, 6), range(4, 7)):  # killed after 5, resumed after 3
        logger = TensorBoardLogger(directory)
        with closing([logger]):
            walk([logger], steps)
    logger.close()  # once more does no harm
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_is_optional(directory, monkeypatch):
    assert len(tensorboard_logger(directory, None)) == 1
    assert tensorboard_logger(directory, False) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tensorboard_logger(directory, None) == []
    with pytest.raises(ValueError, match=r"pip install 'nemorl\[loggers\]'"):
        tensorboard_logger(directory, True)


def test_plots_are_drawn_at_the_end_and_never_fail_a_run(directory, monkeypatch):
    walk([JsonlLogger(directory), PlotCallback(directory)], range(1, 4))
    assert (directory.plots / "loss.png").exists()

    def broken(directory):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plots, "draw", broken)
    with pytest.warns(UserWarning, match=r"could not be drawn.*no fonts"):
        PlotCallback(directory).on_train_end(tiny_run(), {})

"""When checkpoints are written, which are kept, and when a run ends early."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nemorl.runtime.config.base import Condition, Ranking
from nemorl.runtime.run.saving import CheckpointCallback, EarlyStop
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import Callback, StopTraining, notify
from tests.runtime.tiny import TinyRun, in_a_process, recorder, tiny_run


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "")


def steps_of(directory: RunDirectory) -> list[int]:
    return list(checkpoint.present(directory.path))


def walk(
    callbacks: list[Callback],
    values: dict[int, float | None],
    *,
    validation: dict[int, float | None] | None = None,
    first: int = 0,
) -> int:
    """A run that does nothing but notify; returns the step after which it ended."""
    notify(callbacks, "on_train_begin", tiny_run(step=first))
    step, stopped = first, False
    for step, value in values.items():
        run = tiny_run(step=step)
        notify(callbacks, "on_step_begin", tiny_run(step=step - 1), step)
        try:
            if step in (validation or {}):
                notify(callbacks, "on_validation_end", run, step, {"accuracy": validation[step]})
            notify(callbacks, "on_step_end", run, step, {"reward": value, "loss": -value})
        except StopTraining:
            stopped = True
        if stopped:
            break
    notify(callbacks, "on_train_end", tiny_run(step=step), {})
    return step


@pytest.mark.parametrize(
    ("period", "steps", "expected"),
    [
        (0, range(1, 6), [5]),
        (2, range(1, 6), [2, 4, 5]),
        (2, range(1, 5), [2, 4]),
        (2, range(3, 4), [3]),
        (2, range(3, 3), []),
    ],
)
def test_checkpoints_come_by_period_and_at_the_end(directory, period, steps, expected):
    saver = CheckpointCallback(directory, period=period, keep=9)
    walk([saver], dict.fromkeys(steps, 0.0), first=steps.start - 1)
    assert steps_of(directory) == expected


RISES_AND_FALLS = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.7, 5: 0.2}


@pytest.mark.parametrize(
    ("ranking", "keep", "expected", "best"),
    [
        (None, 2, [4, 5], None),
        (Ranking(metric="reward"), 1, [2, 5], 2),
        (Ranking(metric="reward"), 2, [2, 4, 5], 2),
        (Ranking(metric="reward", higher_is_better=False), 2, [1, 5], 1),
        (Ranking(metric="loss"), 2, [2, 4, 5], 2),
        (Ranking(metric="loss", higher_is_better=True), 1, [1, 5], 1),
    ],
)
def test_the_best_and_the_newest_are_kept(directory, ranking, keep, expected, best):
    walk([CheckpointCallback(directory, period=1, keep=keep, ranking=ranking)], RISES_AND_FALLS)
    assert steps_of(directory) == expected
    assert (directory.checkpoints / "best").exists() is (best is not None)
    assert checkpoint.best(directory.path) == (
        directory.checkpoints / f"step_{best}" if best else None
    )
    assert checkpoint.latest(directory.path).name == "step_5"


def test_of_equals_the_later_one_is_better():
    assert Ranking(metric="a").best({1: {"a": 1.0}, 2: {"a": 1.0}, 3: {"a": 0.0}}, 1) == [2]


def test_what_was_not_measured_or_is_no_number_is_never_best(directory):
    values = {1: 0.5, 2: float("nan"), 3: float("inf"), 4: 0.1}
    walk([by_reward(directory, 2)], values)
    assert steps_of(directory) == [1, 4]


def test_validations_among_the_best_are_saved_besides_the_period(directory):
    """Validations of 2, 4, 6 and 8 and a period of 5: 2 is the best so far, 4 the second, 6 is
    neither, 8 the best.
    """
    ranking, saved = Ranking(metric="val_accuracy"), list[int]()
    options = {"ranking": ranking, "observers": (Watcher(saved),)}
    callback = CheckpointCallback(directory, period=5, keep=2, **options)
    walk([callback], dict.fromkeys(range(1, 10), 0.0), validation={2: 0.5, 4: 0.4, 6: 0.3, 8: 0.9})
    assert saved == [2, 4, 5, 8, 9]
    assert steps_of(directory) == [2, 8, 9]
    assert checkpoint.best(directory.path).name == "step_8"


class Watcher(Callback):
    def __init__(self, log: list[int]) -> None:
        self.log = log

    def on_checkpoint(self, trainer, step, path):
        self.log.append(step)


def by_reward(directory: RunDirectory, keep: int) -> CheckpointCallback:
    return CheckpointCallback(directory, period=1, keep=keep, ranking=Ranking(metric="reward"))


def test_the_ranking_goes_on_after_a_resume(directory):
    walk([by_reward(directory, 1)], {1: 0.3, 2: 0.9, 3: 0.5})
    walk([by_reward(directory, 1)], {4: 0.6, 5: 0.7}, first=3)
    assert steps_of(directory) == [2, 5]
    assert checkpoint.best(directory.path).name == "step_2"


def test_a_best_checkpoint_of_an_abandoned_continuation_is_forgotten(directory):
    walk([by_reward(directory, 9)], {1: 0.3, 2: 0.4, 3: 0.9})
    walk([by_reward(directory, 9)], {2: 0.2}, first=1)
    assert steps_of(directory) == [1, 2]
    assert checkpoint.best(directory.path).name == "step_1"


def test_killed_between_a_checkpoint_and_its_ranking(directory):
    """The resumed run ranks and prunes."""
    rank = checkpoint.rank

    def killed(folder: Path, step: int, *args, **options) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        rank(folder, step, *args, **options)

    def killed_run() -> None:
        checkpoint.rank = killed
        walk([recorder(directory), by_reward(directory, 2)], {1: 0.3, 2: 0.5, 3: 0.9})

    assert in_a_process(killed_run)
    assert steps_of(directory) == [1, 2, 3] and checkpoint.latest(directory.path).name == "step_3"
    walk([recorder(directory), by_reward(directory, 2)], {4: 0.1}, first=3)
    assert steps_of(directory) == [2, 3, 4]
    assert checkpoint.best(directory.path).name == "step_3"


def test_checkpoints_know_what_was_measured(directory):
    walk([CheckpointCallback(directory, period=1, keep=9)], {1: 0.3, 2: 0.4}, validation={2: 0.8})
    assert checkpoint.metrics_by_step(directory.path) == {
        1: {"reward": 0.3, "loss": -0.3},
        2: {"val_accuracy": 0.8, "reward": 0.4, "loss": -0.4},
    }


@pytest.mark.parametrize(
    ("text", "last"),
    [("reward >= 0.9", 2), ("reward > 0.9", 5), ("loss<=-0.5", 2), ("val_accuracy > .6", 4)],
)
def test_a_run_ends_when_its_condition_holds(directory, text, last):
    stop = EarlyStop(Condition.parse(text), directory)
    assert walk([stop], RISES_AND_FALLS, validation={2: 0.6, 4: 0.7}) == last


@pytest.mark.parametrize("text", ["accuracy", ">= 3", "a == 1", "a >= high", "a >= nan"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ValueError, match=r"run\.stop_when must be a metric, one of .*write it"):
        Condition.parse(text)


def fail_after(
    directory: RunDirectory, step: int, **options
) -> tuple[TinyRun, CheckpointCallback, RuntimeError]:
    """The saver has seen `step`, and then there was an error."""
    saver, run = CheckpointCallback(directory, **options), tiny_run(step=step)
    notify([saver], "on_train_begin", tiny_run())
    notify([saver], "on_step_begin", tiny_run(step=step - 1), step)
    notify([saver], "on_step_end", run, step, {"reward": 0.5})
    notify([saver], "on_step_begin", run, step + 1)
    return run, saver, RuntimeError("a mishap")


def test_a_whole_step_of_which_the_saver_was_not_told_is_saved(directory):
    """A callback before it raised, or the validation."""
    _, saver, error = fail_after(directory, 3)
    run = tiny_run(step=4, value=4.0)
    run.trainer.train_step()
    notify([saver], "on_exception", run, error)
    assert steps_of(directory) == [4]


def test_an_error_while_the_last_step_is_saved_hides_nothing(directory, monkeypatch):
    run, saver, error = fail_after(directory, 3)

    def full(path):
        raise OSError("no space")

    monkeypatch.setattr(run.trainer, "save_checkpoint", full)
    notify([saver], "on_exception", run, error)
    note = error.__notes__[0]
    assert "while saving: the checkpoint" in note and "no space" in note


@pytest.mark.parametrize(
    ("ranking", "best", "kept"),
    [
        (None, None, [4]),
        (Ranking(metric="val_accuracy"), 4, [4]),
        (Ranking(metric="val_accuracy", higher_is_better=False), 2, [2, 4]),
    ],
)
def test_a_validation_after_the_checkpoint_of_its_step_is_added_to_it(
    directory, ranking, best, kept
):
    """Of a run that ends early; step 2 had 0.5, and step 4 is saved before its validation gives
    0.7.
    """
    saver = CheckpointCallback(directory, period=4, keep=1, ranking=ranking)
    step_4 = directory.checkpoints / "step_4"
    walk([saver], dict.fromkeys(range(1, 5), 0.3), validation={2: 0.5})
    before = (step_4 / "policy" / "model.safetensors").read_bytes()
    notify([saver], "on_validation_end", tiny_run(step=4), 4, {"accuracy": 0.7})
    checkpoint.verify(step_4)
    measured = checkpoint.metrics_by_step(directory.path)[4]
    assert measured == {"reward": 0.3, "loss": -0.3, "val_accuracy": 0.7}
    assert (step_4 / "policy" / "model.safetensors").read_bytes() == before
    found = checkpoint.best(directory.path)
    assert found == (directory.checkpoints / f"step_{best}" if best else None)
    assert steps_of(directory) == kept
    assert not list(directory.checkpoints.glob(".*"))


class Runs:
    """A run that saves in the background:

    `to` takes it through steps whose weights are the step's number.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.told: list[int] = []
        self.run, self.directory = tiny_run(), directory
        self.saver = CheckpointCallback(
            directory, period=1, keep=9, background=True, observers=(Watcher(self.told),)
        )
        notify([self.saver], "on_train_begin", self.run)

    @property
    def may_write(self):
        return self.run.trainer.may_write

    def to(self, step: int) -> None:
        notify([self.saver], "on_step_begin", self.run, step)
        self.run.trainer.tensors = {
            name: tensor * 0 + step for name, tensor in self.run.trainer.tensors.items()
        }
        self.run = replace(self.run, state=replace(self.run.state, step=step))
        self.run.trainer.step += 1
        notify([self.saver], "on_step_end", self.run, step, {"reward": step / 10})

    def fail(self, path, tensors) -> None:
        self.may_write.wait()
        raise OSError("no space")


def weight_of(directory: RunDirectory, step: int) -> float:
    path = directory.checkpoints / f"step_{step}"
    checkpoint.verify(path)
    return float(load_file(path / "policy" / "model.safetensors")["weight"][0])


def test_a_run_goes_on_while_its_checkpoint_is_written(directory):
    runs = Runs(directory)
    runs.saver.period = 2
    runs.may_write.clear()
    for step in (1, 2, 3):
        runs.to(step)
    assert steps_of(directory) == [] and runs.told == []
    runs.may_write.set()
    runs.saver.pending[-1].result(10)
    assert steps_of(directory) == [2] and runs.told == []
    runs.saver.on_step_begin(runs.run, 4)
    assert runs.told == [2]
    notify([runs.saver], "on_train_end", runs.run, {})
    assert steps_of(directory) == runs.told == [2, 3]
    assert [weight_of(directory, step) for step in (2, 3)] == [2.0, 3.0]
    runs.saver.close()


def test_what_fails_in_the_background_ends_the_run_at_the_next_step(directory, monkeypatch):
    runs = Runs(directory)
    runs.to(1)
    runs.saver.settle(runs.run, wait=True)
    monkeypatch.setattr(runs.run.trainer, "_write", runs.fail)
    runs.may_write.clear()
    runs.to(2)
    runs.may_write.set()
    runs.saver.pending[-1].exception(10)
    message = r"step_2 could not be written \(no space\).*The previous one, if any, is intact"
    with pytest.raises(checkpoint.CheckpointError, match=message) as caught:
        runs.to(3)
    assert steps_of(directory) == runs.told == [1]
    assert not list(directory.checkpoints.glob(".tmp*"))
    notify([runs.saver], "on_exception", runs.run, caught.value)
    (note,) = caught.value.__notes__
    assert note.startswith(f"{directory.path} has a checkpoint of step 1: resume from it with --")

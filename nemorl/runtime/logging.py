"""The callbacks that write a run's directory. Put `CheckpointCallback` last: a checkpoint vouches for what the others have written before it."""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

from nemorl.runtime import checkpoint
from nemorl.runtime.callbacks import Callback, notify
from nemorl.runtime.run_directory import RunDirectory
from nemorl.runtime.state import Run


class JsonlLogger(Callback):
    """metrics.jsonl: a line for every step and every validation."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.directory.append_metrics(step, metrics)

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.directory.append_metrics(step, metrics, phase="validation")


class SampleLogger(Callback):
    """samples/step_N.jsonl: the first `limit` responses of each step."""

    def __init__(self, directory: RunDirectory, *, limit: int = 8) -> None:
        self.directory, self.limit = directory, limit

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        if samples[: self.limit]:
            self.directory.append_samples(step, samples[: self.limit])


class TensorBoardLogger(Callback):
    """Events for TensorBoard, as train/… and validation/…; after a resume those of the steps that are done again are hidden."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.writer: Any = None

    def on_train_begin(self, trainer: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.directory.tensorboard), purge_step=trainer.state.step + 1)

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._write("train", step, metrics)

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._write("validation", step, metrics)

    def _write(self, phase: str, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"{phase}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def tensorboard_logger(directory: RunDirectory, wanted: bool | None) -> list[Callback]:
    """The TensorBoard logger as a list of one or none. `wanted` is `run.tensorboard`; None: if the package is there.

    Raises ValueError where it is wanted and the package is missing.
    """
    installed = importlib.util.find_spec("tensorboard") is not None
    if wanted and not installed:
        raise ValueError(
            "run.tensorboard can't be True, because the package tensorboard is not installed: pip install 'nemorl[loggers]', or leave it out"
        )
    return [TensorBoardLogger(directory)] if installed and wanted is not False else []


class SignalWatch(Callback):
    """A warning when nothing has been learned from for `patience` steps, because in no group did the rewards differ."""

    def __init__(self, patience: int = 10) -> None:
        self.patience, self.silent = patience, 0

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.silent = self.silent + 1 if metrics.get("informative_groups") == 0 else 0
        if self.silent == self.patience:
            warnings.warn(
                f"step {step}: for {self.patience} steps all responses to each prompt had the same reward, so nothing is learned: "
                "look at samples/ and at the reward; easier prompts, more responses per prompt or some SFT first may help",
                stacklevel=2,
            )


class CheckpointCallback(Callback):
    """A checkpoint after every `period` steps and at the end (0: only at the end). `observers` are told of each through `on_checkpoint`."""

    def __init__(self, directory: RunDirectory, *, period: int = 0, keep: int = 2, observers: tuple[Callback, ...] = ()) -> None:
        self.directory, self.period, self.keep, self.observers = directory, period, keep, observers
        self.saved_step: int | None = None

    def on_train_begin(self, trainer: Run) -> None:
        self.saved_step = trainer.state.step  # what a run starts from is on the disk already, or is its untrained model

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        if self.period and step % self.period == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if self.saved_step != trainer.state.step:
            self._save(trainer)

    def _save(self, trainer: Run) -> None:
        for file in (self.directory.metrics, *self.directory.samples.glob(f"step_{trainer.state.step}.jsonl")):
            flush_to_disk(file)
        path = checkpoint.save(self.directory.path, trainer, keep=self.keep)
        self.saved_step = trainer.state.step
        notify(self.observers, "on_checkpoint", trainer, trainer.state.step, path)


def flush_to_disk(path: Path) -> None:
    """Have a file's contents on the disk, so that they survive a power cut; nothing where there is no such file."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


class PlotCallback(Callback):
    """plots/*.png at the end of the run. A picture that can't be drawn is a warning: the training that it shows is safe."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        from nemorl.runtime.plots import draw

        try:
            draw(self.directory)
        except Exception as error:
            warnings.warn(f"the plots of {self.directory.path} could not be drawn: {error!r}", stacklevel=2)

"""The callbacks that end a run in time and keep what it has learned.

They come last: a checkpoint vouches for what was written before it.
"""

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemorl.checks import require
from nemorl.runtime.config.metric_rules import VALIDATION, Condition, MetricWatch, Ranking
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.callbacks import Callback, StopTraining, notify
from nemorl.runtime.run.checkpoint import CheckpointError
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.random_state import RandomState, random_state
from nemorl.runtime.run.state import Run

LOGGER = logging.getLogger(__name__)


class EarlyStop(Callback):
    """Ends the run after the step in which a metric meets the condition. A run that had met it
    already does nothing more when it is resumed.

    The log is told why, and (unless `quiet`) the terminal once nothing is drawn there any more.
    """

    def __init__(
        self, condition: Condition, directory: RunDirectory | None = None, *, quiet: bool = False
    ) -> None:
        self.condition, self.directory, self.quiet = condition, directory, quiet
        self.watch = MetricWatch("run.stop_when", condition.metric)
        self.reason: str | None = None

    def on_train_begin(self, trainer: Run) -> None:
        for line in self.directory.read_metrics() if self.directory and trainer.state.step else []:
            validation = line.get("phase") == "validation"
            name = self.condition.metric.removeprefix(VALIDATION)
            if (
                line.get("step") == trainer.state.step
                and validation == self.watch.of_validation
                and name in line
            ):
                self._check(trainer.state.step, line, validation=validation)

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._check(step, metrics, validation=True)

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self._check(step, metrics, validation=False)

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if self.reason and not self.quiet:
            print(self.reason)

    def _check(self, step: int, metrics: dict[str, Any], *, validation: bool) -> None:
        value = self.watch.look(metrics, validation=validation)
        if value is not None and self.condition.holds(value):
            self.reason = (
                f"the run ends after step {step}: {self.condition.metric} is {value:g}, and"
                f" run.stop_when is {str(self.condition)!r}"
            )
            LOGGER.info(self.reason)
            raise StopTraining(self.reason)


@dataclass(frozen=True)
class WholeStep:
    """What tells whether the weights still are those of a finished step, and what else a checkpoint
    of it needs.
    """

    step: int
    updates: int
    """Optimizer steps that the trainer had taken."""
    generators: RandomState
    """Of the moment when the step was over: a run that goes on from it draws the same numbers."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Publication:
    """A checkpoint that is being written while the run goes on."""

    step: int
    previous: int | None
    """The step that was saved before it, which counts if this one fails."""
    path: "Future[Path]"


class CheckpointCallback(Callback):
    """A checkpoint after every `period` steps (0: none of these) and at the end; after an error,
    too, if the weights still are those of a whole step.

    The newest `keep` are kept. With a `ranking` it is the best `keep` and the newest, and where
    that goes by a metric of the validation, a step whose validation is among the best gets a
    checkpoint, too. `observers` are told of each through `on_checkpoint`.

    With `background` the run goes on while a checkpoint is written and published in a thread. As a
    later step begins or ends observers are told, or what went wrong is raised. The next checkpoint,
    the end and an error wait for it.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        period: int = 0,
        keep: int = 2,
        ranking: Ranking | None = None,
        observers: tuple[Callback, ...] = (),
        background: bool = False,
    ) -> None:
        self.directory, self.period, self.keep, self.ranking, self.observers = (
            directory,
            period,
            keep,
            ranking,
            observers,
        )
        self.watch = MetricWatch("run.metric", ranking.metric) if ranking else None
        self.saved_step: int | None = None
        self.whole: WholeStep | None = None
        self.metrics: dict[str, float] = {}
        self.is_among_the_best = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self.pending: Publication | None = None

    def on_train_begin(self, trainer: Run) -> None:
        able = self.thread is None or hasattr(trainer.trainer, "wait_for_checkpoint")
        require(
            able,
            "run.async_save",
            "needs a training backend with wait_for_checkpoint",
            True,
            "leave it out, or give yours that method",
        )
        self.saved_step = (
            trainer.state.step
        )  # what a run starts from is on the disk already, or is its untrained model
        self.whole = WholeStep(trainer.state.step, trainer.trainer.step, random_state(), {})

    def on_step_begin(self, trainer: Run, step: int) -> None:
        self.metrics, self.is_among_the_best = {}, False
        self.settle(trainer, wait=False)

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        found = {VALIDATION + name: value for name, value in metrics.items()}
        self.metrics = {**self.metrics, **found}
        if (
            self.whole and self.whole.step == step
        ):  # the validation of a run that ended early, after the step's end
            self.whole = replace(self.whole, metrics=self.metrics)
        ranked = self.watch is not None and self.watch.look(metrics, validation=True) is not None
        self.settle(
            trainer, wait=self.ranking is not None or step == self.saved_step
        )  # a rival, or the one that this validation belongs to
        if step == self.saved_step:
            if (self.directory.checkpoints / f"step_{step}").exists():
                checkpoint.add_metrics(
                    self.directory.path, step, found, keep=self.keep, ranking=self.ranking
                )
        elif self.ranking and ranked:
            rivals = {
                other: known
                for other, known in checkpoint.metrics_by_step(self.directory.path).items()
                if other < step
            }
            self.is_among_the_best = step in self.ranking.best(
                {**rivals, step: self.metrics}, self.keep
            )

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.metrics = {**self.metrics, **metrics}
        self.whole = WholeStep(step, trainer.trainer.step, random_state(), self.metrics)
        if self.watch:
            self.watch.look(metrics, validation=False)
        self.settle(trainer, wait=False)
        if self.is_among_the_best or (self.period and step % self.period == 0):
            self._save(trainer)

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        self.settle(trainer, wait=True)
        if self.saved_step != trainer.state.step:
            self._save(trainer)
            self.settle(trainer, wait=True)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """Save the last whole step unless it is saved or an update has begun since then; tell the
        error where the run goes on from.
        """
        if self.saved_step is None or self.whole is None:
            return  # it never began
        step, kept = trainer.state.step, self._settled_after(error, trainer)
        of_this_step = (
            self.whole.step == step
        )  # otherwise the step is whole, but something came before this callback was told
        if of_this_step and self.whole.updates != trainer.trainer.step:
            kept += (
                f"the update of step {step + 1} had begun, so the weights of step {step} are gone; "
            )
        elif self.saved_step != step and not isinstance(error, CheckpointError):
            try:
                self._save(trainer, self.whole if of_this_step else None)
                self.settle(trainer, wait=True)
            except Exception as failure:
                whole = self.saved_step == step
                failed = (
                    "was saved, but a callback's on_checkpoint failed"
                    if whole
                    else "could not be saved"
                )
                kept += f"step {step} {failed} ({failure}); "
        if (self.directory.checkpoints / f"step_{self.saved_step}").exists():
            where = f"{self.directory.path} has a checkpoint of step {self.saved_step}"
            error.add_note(
                f"{kept}{where}: go on from there with --run.dir {self.directory.path} --run.resume"
                " once the cause is mended."
            )
        elif kept:
            error.add_note(f"{kept}there is no checkpoint to go on from.")

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown()

    def settle(self, trainer: Run, *, wait: bool) -> None:
        """Take note of a checkpoint that was being written: if it is done by now, or once it is.

        Raises CheckpointError if that failed.
        """
        pending = self.pending
        if pending is None or not (wait or pending.path.done()):
            return
        try:
            path = pending.path.result()
        except Exception:
            self.saved_step = pending.previous
            raise
        finally:
            if pending.path.done():
                self.pending = None
        notify(self.observers, "on_checkpoint", trainer, pending.step, path)

    def _settled_after(self, error: BaseException, trainer: Run) -> str:
        """The same after an error, of which it must hide nothing: what went wrong, in words."""
        pending = self.pending
        try:
            self.settle(trainer, wait=True)
        except Exception as failure:
            assert pending is not None
            what = (
                f"step {pending.step} could not be saved"
                if self.saved_step == pending.previous
                else "a callback's on_checkpoint failed"
            )
            return f"{what} ({failure}); "
        return ""

    def _save(self, trainer: Run, whole: WholeStep | None = None) -> None:
        self.settle(trainer, wait=True)
        for file in (
            self.directory.metrics,
            *self.directory.samples.glob(f"step_{trainer.state.step}.jsonl"),
        ):
            flush_to_disk(file)
        metrics, generators = (
            (whole.metrics, whole.generators) if whole else (self.metrics, random_state())
        )
        options: dict[str, Any] = {"metrics": metrics, "generators": generators}
        before, step = self.saved_step, trainer.state.step
        if self.thread is None:
            path = checkpoint.save(
                self.directory.path, trainer, keep=self.keep, ranking=self.ranking, **options
            )
            self.saved_step = step
            notify(self.observers, "on_checkpoint", trainer, step, path)
            return
        begun = checkpoint.begin(self.directory.path, trainer, background=True, **options)
        self.saved_step = step
        self.pending = Publication(
            step, before, self.thread.submit(begun.publish, keep=self.keep, ranking=self.ranking)
        )


def flush_to_disk(path: Path) -> None:
    """Have a file's contents on the disk, so that they survive a power cut; nothing where there is
    no such file.
    """
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())

"""What a run leaves: checkpoints, an exported model and a result, and what writes them."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import warn
from nemorl.models.hub import CONFIG
from nemorl.runtime.config.base import VALIDATION, Condition, MetricWatch, Ranking
from nemorl.runtime.config.grpo import GapConfig
from nemorl.runtime.config.tree import to_dict
from nemorl.runtime.config.yaml_io import without_secrets
from nemorl.runtime.run.launch import Launch
from nemorl.runtime.run.registry import has_method
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.checkpoint import CheckpointError, RandomState
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.export import write_checkpoint, write_pretrained
from nemorl.runtime.store.files import flush
from nemorl.runtime.store.state import POLICY, RunView
from nemorl.runtime.watch.alerts import GapWatch, ResourceMeter, SignalWatch
from nemorl.runtime.watch.callbacks import Callback, StopTraining, notify
from nemorl.runtime.watch.display import make_display
from nemorl.runtime.watch.loggers import LoggedRun, Recorder

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The result of a run in memory, in every process under torchrun."""

    metrics: dict[str, float]
    """Of the last step, and of the last validation as val_…"""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl, of steps and validations."""
    paths: RunDirectory
    """Where the rest is: paths.path, paths.hf, paths.metrics, paths.plots, paths.checkpoints, …"""
    model: nn.Module | None
    """None where it was spread over ranks: load it from paths.hf."""
    tokenizer: Any

    def _shown(self) -> dict[str, str]:
        step = max((line["step"] for line in self.history), default=0)
        first = [name for name in SHOWN if name in self.metrics]
        return {"step": str(step)} | {name: f"{self.metrics[name]:.3g}" for name in first}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self._shown().items())
        return f"TrainResult({values}, path={str(self.paths.path)!r})"

    def _repr_html_(self) -> str:
        shown = {**self._shown(), "path": str(self.paths.path)}
        rows = (f"<tr><td>{k}</td><td>{escape(v)}</td></tr>" for k, v in shown.items())
        return f"<b>TrainResult</b><table>{''.join(rows)}</table>"


SHOWN = ("reward", "val_reward", "accuracy", "val_accuracy", "loss", "val_loss")


def final_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the last step, and of the last validation as val_NAME.

    >>> train = {"step": 1, "phase": "train", "loss": 2.0}
    >>> final_metrics([train, {"step": 1, "phase": "validation", "accuracy": 0.5}])
    {'loss': 2.0, 'val_accuracy': 0.5}
    """
    last = {line["phase"]: line for line in history}
    return {
        prefix + name: value
        for phase, prefix in (("train", ""), ("validation", "val_"))
        for name, value in last.get(phase, {}).items()
        if name not in ("step", "time", "phase")
    }


class EarlyStop(Callback):
    """End the run after a step in which a metric meets the condition, also when resumed there."""

    def __init__(
        self, condition: Condition, directory: RunDirectory, *, quiet: bool = False
    ) -> None:
        self.condition, self.directory, self.quiet = condition, directory, quiet
        self.watch = MetricWatch("run.stop_when", condition.metric)

    def on_train_begin(self, trainer: RunView) -> None:
        step, name = trainer.state.step, self.condition.metric.removeprefix(VALIDATION)
        for line in self.directory.read_metrics():
            if line["step"] == step and name in line:
                self._check(step, line, validation=line["phase"] == "validation")

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self._check(step, metrics, validation=True)

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self._check(step, metrics, validation=False)

    def _check(self, step: int, metrics: dict[str, Any], *, validation: bool) -> None:
        value = self.watch.look(metrics, validation=validation)
        if value is not None and self.condition.holds(value):
            reason = (
                f"the run ends after step {step}: {self.condition.metric} is {value:g}, and"
                f" run.stop_when is {str(self.condition)!r}"
            )
            LOGGER.info(reason)
            if not self.quiet:
                print(reason)
            raise StopTraining(reason)


@dataclass(frozen=True)
class WholeStep:
    """What a checkpoint of the last finished step needs besides the weights."""

    step: int
    updates: int
    generators: RandomState
    metrics: dict[str, float]


class CheckpointCallback(Callback):
    """Save a checkpoint every `period` steps (0: none of these) and at the end, and the last whole
    step after an error.

    The newest `keep` stay; with a `ranking` the best `keep` and the newest, and a step whose
    validation is among the best is saved, too. With `background`, without a ranking, the run goes
    on while a checkpoint is written.
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
        self.directory, self.period, self.observers = directory, period, observers
        self.keep, self.ranking, self.background = keep, ranking, background
        self.watch = MetricWatch("run.metric", ranking.metric) if ranking else None
        self.saved_step: int | None = None
        self.whole: WholeStep | None = None
        self.metrics: dict[str, float] = {}
        self.is_among_the_best = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: tuple[int, int | None, Future[Path]] | None = None
        """The step of a checkpoint that is being written, the one saved before, and its path."""

    def on_train_begin(self, trainer: RunView) -> None:
        self.saved_step = trainer.state.step  # a run starts from a checkpoint or a given model
        self.whole = WholeStep(trainer.state.step, trainer.updates, RandomState.now(), {})
        # A kill may have come between the checkpoint and its ranking.
        here = [line for line in self.directory.read_metrics() if line["step"] == self.saved_step]
        self._rank(self.saved_step, final_metrics(here))

    def on_step_begin(self, trainer: RunView, step: int) -> None:
        self.metrics, self.is_among_the_best = {}, False
        self.settle(trainer, wait=False)

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        found = {VALIDATION + name: value for name, value in metrics.items()}
        self.metrics = {**self.metrics, **found}
        if self.whole and self.whole.step == step:  # of a run that ended early, after the step
            self.whole = replace(self.whole, metrics=self.metrics)
        if self.watch:
            self.watch.look(metrics, validation=True)
        if step == self.saved_step:
            self.settle(trainer, wait=True)
            self._rank(step, found)
        elif self.ranking:
            saved = checkpoint.metrics_by_step(self.directory.path)
            rivals = {other: saved[other] for other in saved if other < step}
            best = self.ranking.best({**rivals, step: self.metrics}, self.keep)
            self.is_among_the_best = step in best

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self.metrics = {**self.metrics, **metrics}
        self.whole = WholeStep(step, trainer.updates, RandomState.now(), self.metrics)
        if self.watch:
            self.watch.look(metrics, validation=False)
        self.settle(trainer, wait=False)
        if self.is_among_the_best or (self.period and step % self.period == 0):
            self._save(trainer)

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        self.settle(trainer, wait=True)
        if self.saved_step != trainer.state.step:
            self._save(trainer)
            self.settle(trainer, wait=True)

    def on_exception(self, trainer: RunView, error: BaseException) -> None:
        """Save the last whole step, unless an update has begun since, and note how to go on."""
        if self.saved_step is None or self.whole is None:
            return  # it never began
        step, notes = trainer.state.step, list[str]()
        # Otherwise the step is whole, but another callback failed before this one was called.
        current = self.whole.step == step
        updated = current and self.whole.updates != trainer.updates
        if updated:
            notes.append(
                f"the update of step {step + 1} had begun, so the weights of step {step} are gone"
            )
        try:
            self.settle(trainer, wait=True)
            if not (updated or self.saved_step == step or isinstance(error, CheckpointError)):
                self._save(trainer, self.whole if current else None)
                self.settle(trainer, wait=True)
        except Exception as failure:
            notes.append(f"while saving: {failure}")
        if (self.directory.checkpoints / f"step_{self.saved_step}").exists():
            notes.append(
                f"{self.directory.path} has a checkpoint of step {self.saved_step}: resume from it"
                f" with --run.dir {self.directory.path} --run.resume."
            )
        elif notes:
            notes.append("there is no checkpoint to resume from.")
        if notes:
            error.add_note("; ".join(notes))

    def close(self) -> None:
        self.thread.shutdown()

    def settle(self, trainer: RunView, *, wait: bool) -> None:
        """Notify observers of a checkpoint that has been written. Raises: what failed in it."""
        if self.pending is None:
            return
        step, previous, writing = self.pending
        if not (wait or writing.done()):
            return
        try:
            path = writing.result()
        except Exception:
            self.saved_step = previous
            raise
        finally:
            if writing.done():
                self.pending = None
        notify(self.observers, "on_checkpoint", trainer, step, path)

    def _rank(self, step: int, metrics: dict[str, float]) -> None:
        if (self.directory.checkpoints / f"step_{step}").exists():
            checkpoint.rank(
                self.directory.path, step, metrics, keep=self.keep, ranking=self.ranking
            )

    def _save(self, trainer: RunView, whole: WholeStep | None = None) -> None:
        self.settle(trainer, wait=True)
        step, directory = trainer.state.step, self.directory
        for file in (directory.metrics, directory.groups, directory.samples_file(step)):
            if file.exists():
                flush(file)
        publish = checkpoint.begin(
            directory.path,
            trainer,
            keep=self.keep,
            ranking=self.ranking,
            metrics=whole.metrics if whole else self.metrics,
            generators=whole.generators if whole else None,
            background=self.background,
        )
        self.pending = step, self.saved_step, self.thread.submit(publish)
        self.saved_step = step
        if not self.background:
            self.settle(trainer, wait=True)


class ExportCallback(Callback):
    """Write the policy to hf/ and others to hf-NAME/, or with `adapter` their adapters alone."""

    def __init__(
        self, directory: RunDirectory, models: Mapping[str, nn.Module], *, adapter: bool = False
    ) -> None:
        self.directory, self.models, self.adapter = directory, models, adapter

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        tokenizer = trainer.tokenizer
        for name, model in self.models.items():
            hf = self.directory.hf if name == POLICY else self.directory.path / f"hf-{name}"
            saved = self.directory.checkpoints / f"step_{trainer.state.step}" / name
            if self.adapter and (saved / CONFIG).exists():  # not for a value head
                write_checkpoint(hf, saved, tokenizer, lora="adapter")
            else:
                write_pretrained(hf, trainer.backends[name].weights(), model, tokenizer)


def loop_callbacks(
    launch: Launch, backends: Mapping[str, Any], *, total_steps: int | None
) -> list[Callback]:
    """Return the callbacks of a loop: those that save come after those that record."""
    config, directory, quiet = launch.config, launch.directory, launch.quiet
    launch.log.total_steps = total_steps
    given = has_method(config, "weights")  # else those of a Hugging Face model are its parameters
    exported = {
        name: model
        for name, each in backends.items()
        if (model := getattr(each, "model", None)) is not None
        and (given or hasattr(model, "save_pretrained"))
    }
    logged = LoggedRun(
        directory=directory,
        run_id=launch.log.record.run_id,
        config=without_secrets(to_dict(config)),
        project=config.run.project,
        samples_per_step=config.run.samples_per_step,
    )
    found: list[Callback] = [
        launch.log,
        *launch.callbacks,
        ResourceMeter(),
        make_display(config.run.display, total_steps=total_steps),
        Recorder(launch.loggers, logged),
        *[SignalWatch()] * (getattr(config, "reward_coef", 1.0) > 0),
    ]
    observers = tuple(found)
    if condition := config.run.stop_condition():
        found.append(EarlyStop(condition, directory, quiet=quiet))
    found.append(
        CheckpointCallback(
            directory,
            period=config.run.save_period,
            keep=config.run.keep_checkpoints,
            ranking=config.run.ranking(),
            observers=observers,
            background=config.run.async_save,
        )
    )
    if isinstance(gap := getattr(config, "gap", None), GapConfig):
        found.append(GapWatch(gap, directory))
    if config.run.export and POLICY not in exported:
        warn(
            f"{directory.hf} will not be written, because trainer.backend"
            f" {config.trainer.backend!r} has no attribute model or no weights to export"
        )
    elif config.run.export:
        found.append(ExportCallback(directory, exported, adapter=config.lora.export == "adapter"))
    if config.run.plots:
        from nemorl.runtime.watch.curves import PlotCallback

        found.append(PlotCallback(directory))
    return found

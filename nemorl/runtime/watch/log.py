"""log.jsonl: the events, warnings and errors of a run, through Python's logging, one JSON object a
line: time, level, run_id, step, rank, logger, event, message. Steps are in metrics.jsonl.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.tree import flat, to_dict
from nemorl.runtime.store.directory import RunDirectory, RunRecord, Status, append_lines
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback

LOGGER = logging.getLogger("nemorl")


class LogFile(logging.Handler):
    """Append to log.jsonl what nemorl logs, and the warnings of others."""

    def __init__(self, directory: RunDirectory, fields: dict[str, Any]) -> None:
        super().__init__(logging.INFO)
        self.directory, self.fields = directory, fields

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.partition(".")[0] == "nemorl":
            with suppress(Exception):
                moment = datetime.fromtimestamp(record.created, UTC)
                line = {
                    "time": moment.isoformat(timespec="milliseconds"),
                    "level": record.levelname,
                    **self.fields,
                    "logger": record.name,
                    "event": getattr(record, "event", "message"),
                    "message": record.getMessage(),
                    **getattr(record, "details", {}),
                }
                if record.exc_info:
                    line["traceback"] = logging.Formatter().formatException(record.exc_info)
                append_lines(self.directory.log, [line])


@dataclass(eq=False)
class RunLog(Callback):
    """Log a run's events, and keep its run.json. Comes first."""

    directory: RunDirectory
    record: RunRecord
    fields: dict[str, Any]
    total_steps: int | None = None

    def on_train_begin(self, trainer: RunView) -> None:
        step = self.fields["step"] = trainer.state.step
        self.record = replace(self.record, total_steps=self.total_steps)
        self.record.write(self.directory)
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        event(
            "train_begin",
            f"training begins after step {step}{of}",
            total_steps=self.total_steps,
            defaults=changed_settings(trainer.config),
        )

    def on_step_begin(self, trainer: RunView, step: int) -> None:
        self.fields["step"] = step

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        event("validation", f"validation after step {step}", metrics=metrics)

    def on_checkpoint(self, trainer: RunView, step: int, path: Path) -> None:
        event("checkpoint", f"checkpoint of step {step} written", path=str(path))

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        step = self.fields["step"] = trainer.state.step  # less than began, if one was dropped
        event("train_end", f"training ends after step {step}", metrics=metrics)


def event(name: str, message: str, **details: Any) -> None:
    """Log a line with a name."""
    LOGGER.info(message, extra={"event": name, "details": details})


def changed_settings(config: object) -> dict[str, Any]:
    """Return the changed settings (dotted) with their defaults."""
    try:
        defaults = flat(to_dict(type(config)()))
    except TypeError:  # no dataclass, or one with required fields
        return {}
    given = flat(to_dict(config)).items()
    return {key: defaults.get(key) for key, value in given if (key, value) not in defaults.items()}


@contextmanager
def recorded(directory: RunDirectory, *, algorithm: str) -> Iterator[RunLog]:
    """Keep run.json and log.jsonl while the block runs."""
    before = RunRecord.read(directory) if directory.holds_results() else None
    record = RunRecord.begin(directory, algorithm=algorithm, previous=before)
    fields = {"run_id": record.run_id, "step": 0, "rank": int(os.environ.get("RANK", 0))}
    handler, log = LogFile(directory, fields), RunLog(directory, record, fields)
    status: Status = "finished"
    error: str | None = None
    with _listening(handler):
        kind = "run" if len(record.sessions) == 1 else "resumed run"
        event("run_begin", f"{kind} {record.run_id} in {directory.path}", argv=sys.argv[1:])
        try:
            yield log
        except BaseException as raised:
            status = "failed" if isinstance(raised, Exception) else "interrupted"
            said = f"{type(raised).__name__}: {raised}".removesuffix(": ")
            error = "\n".join([said, *getattr(raised, "__notes__", ())])
            level = logging.ERROR if status == "failed" else logging.WARNING
            # Only to the file: whoever catches the error shows it.
            _handle(handler, level, LOGGER.name, error, f"run_{status}", exc_info=sys.exc_info())
            raise
        else:
            event("run_finished", "the run is finished")
        finally:
            ended = replace(log.record, status=status, error=error, ended=round(time.time(), 3))
            try:
                ended.write(directory)
            except OSError as problem:  # a full disk must not hide what ended the run
                LOGGER.warning("%s", problem)


@contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    """Add a handler of all that is logged or warned of."""
    root, show, level = logging.getLogger(), warnings.showwarning, LOGGER.level
    added: list[tuple[logging.Logger, logging.Handler]] = [(root, handler)]
    if logging.lastResort is not None and not root.handlers:
        added.append((root, logging.lastResort))  # which prints warnings where no handler is
    others = map(logging.getLogger, ("transformers", "datasets"))
    added += [(each, handler) for each in others if not each.propagate]

    def show_and_log(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        details = {"category": category.__name__, "place": f"{filename}:{lineno}"}
        _handle(handler, logging.WARNING, "py.warnings", str(message), "warning", details=details)
        show(message, category, filename, lineno, file, line)

    for logger, each in added:
        logger.addHandler(each)
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    warnings.showwarning = show_and_log
    try:
        yield
    finally:
        if warnings.showwarning is show_and_log:
            warnings.showwarning = show
        LOGGER.setLevel(level)
        for logger, each in added:
            logger.removeHandler(each)


def _handle(
    handler: logging.Handler, level: int, name: str, message: str, event: str, **fields: Any
) -> None:
    fields |= {"levelno": level, "levelname": logging.getLevelName(level), "name": name}
    handler.handle(logging.makeLogRecord(fields | {"msg": message, "event": event}))


@contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Announce something slow, and how long it took."""
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    event("waiting", what)
    console.print(f"{what} …")
    start = time.perf_counter()
    with console.status("waiting …") if console.is_terminal and not quiet else nullcontext():
        yield
    seconds = time.perf_counter() - start
    event("ready", f"{what}: ready after {seconds:.1f} s", seconds=seconds)
    console.print(f"ready after {seconds:.0f} s")


def waiting_for_engines(
    config: GenerationConfig, *, quiet: bool = False
) -> AbstractContextManager[None]:
    """Show the wait for engines, if any, in the block."""
    if not config.traits.engines:
        return nullcontext()
    logs = f", whose logs are in {config.log_dir}" if config.log_dir else ""
    return waiting(
        f"starting {config.num_replicas} x {config.backend} through Ray{logs}", quiet=quiet
    )


def waiting_for_ranks(
    plan: ParallelPlan, who: str, *, quiet: bool = False
) -> AbstractContextManager[None]:
    """Show the wait for a trainer on ranks in the block."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep")
    spread = ", ".join(f"{name} {size}" for name in axes if (size := getattr(plan, name) or 1) > 1)
    devices = f"{plan.num_ranks} device{'s' * (plan.num_ranks > 1)}"
    how = f"{spread or 'one rank'}; {plan.precision}"
    return waiting(f"training on {devices} ({how}), {who}", quiet=quiet)

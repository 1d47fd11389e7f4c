"""log.jsonl: what a run had to say, through Python's logging, one JSON object a line: time, level,
run_id, step, rank, logger, event, message.

Our own events and warnings, the warnings of the libraries below us, and the error that ended a run.
Steps are not in it: metrics.jsonl has them.
"""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import RunDirectory, to_json
from nemorl.runtime.run.record import RunRecord, Status, begin_record, read_record, write_record
from nemorl.runtime.run.state import Run

LOGGER = logging.getLogger("nemorl")
LIBRARIES = ("transformers", "datasets")
"""Loggers that keep what they say to themselves."""


class JsonLogHandler(logging.Handler):
    """Writes log records as lines of JSON.

    What can't be written (a full disk) is dropped: a log is no reason to end a run.
    """

    def __init__(self, path: Path, *, run_id: str, rank: int = 0) -> None:
        super().__init__(logging.INFO)
        self.path, self.run_id, self.rank = path, run_id, rank
        self.step = 0
        """The step that the run is in or has just done."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.partition(".")[0] != "nemorl":
            return  # what other libraries tell of their daily work
        try:
            line = {
                "time": (
                    f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"
                ),
                "level": record.levelname,
                "run_id": self.run_id,
                "step": self.step,
                "rank": self.rank,
                "logger": record.name,
                "event": getattr(record, "event", "message"),
                "message": record.getMessage(),
                **getattr(record, "details", {}),
            }
            if record.exc_info:
                line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json(line), ensure_ascii=False) + "\n")
        except Exception:
            self.errors = getattr(self, "errors", 0) + 1


class RunLog(Callback):
    """The events of a run as lines of its log, and its end in run.json.

    First of all callbacks, so that what they say has the right step.
    """

    def __init__(self, directory: RunDirectory, handler: JsonLogHandler, record: RunRecord) -> None:
        self.directory, self.handler, self.record = directory, handler, record
        self.total_steps: int | None = None
        self.began = False
        """Whether the loop was reached."""

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def on_train_begin(self, trainer: Run) -> None:
        self.began = True
        self.handler.step = trainer.state.step
        self.record = replace(self.record, total_steps=self.total_steps)
        write_record(self.directory, self.record)
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        event(
            "train_begin",
            f"training begins after step {trainer.state.step}{of}",
            total_steps=self.total_steps,
        )

    def on_step_begin(self, trainer: Run, step: int) -> None:
        self.handler.step = step

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        event("validation", f"validation after step {step}", metrics=metrics)

    def on_checkpoint(self, trainer: Run, step: int, path: Path) -> None:
        event("checkpoint", f"checkpoint of step {step} written", path=str(path))

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        event("train_end", f"training ends after step {trainer.state.step}", metrics=metrics)


def event(name: str, message: str, **details: Any) -> None:
    """A line of the log that a program can find by its name."""
    LOGGER.info(message, extra={"event": name, "details": details})


@contextmanager
def recorded(
    directory: RunDirectory, *, algorithm: str, rank: int | None = None
) -> Iterator[RunLog]:
    """Keep run.json and log.jsonl while the block runs: its begin, all that is logged and warned
    of, and how it ends.

    Warnings and log messages also go where they went before. `rank` is that of the process, RANK
    unless given.
    """
    before = read_record(directory) if directory.holds_results() else None
    record = begin_record(directory, algorithm=algorithm)
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    handler = JsonLogHandler(directory.log, run_id=record.run_id, rank=rank)
    log = RunLog(directory, handler, record)
    status: Status = "finished"
    error: str | None = None
    with _listening(handler):
        event(
            "run_begin",
            f"{'run' if len(record.sessions) == 1 else 'resumed run'} {record.run_id} in"
            f" {directory.path}",
            argv=sys.argv[1:],
        )
        try:
            yield log
        except BaseException as raised:
            status = "failed" if isinstance(raised, Exception) else "interrupted"
            error = "\n".join(
                [
                    f"{type(raised).__name__}: {raised}".removesuffix(": "),
                    *getattr(raised, "__notes__", ()),
                ]
            )
            level = logging.ERROR if status == "failed" else logging.WARNING
            extra = {"event": f"run_{status}"}
            handler.handle(
                LOGGER.makeRecord(
                    LOGGER.name, level, __file__, 0, error, (), sys.exc_info(), extra=extra
                )
            )  # whoever catches it shows it
            raise
        else:
            event("run_finished", "the run is finished")
        finally:
            refused = (
                status == "failed" and before is not None and not log.began
            )  # a resume that could not be: the run is what it was
            _try_to_write(
                directory,
                (
                    before
                    if before and refused
                    else replace(
                        log.record, status=status, error=error, ended=round(time.time(), 3)
                    )
                ),
            )


def _try_to_write(directory: RunDirectory, record: RunRecord) -> None:
    try:
        write_record(directory, record)
    except OSError as error:  # on a full disk what ended the run is the news, not this
        LOGGER.warning("run.json could not be written: %r", error)


@contextmanager
def _listening(handler: JsonLogHandler) -> Iterator[None]:
    """Let a handler hear of everything that is logged or warned of, without taking it from anybody
    else.
    """
    root, show, level = logging.getLogger(), warnings.showwarning, LOGGER.level
    silent = [logging.lastResort] if logging.lastResort is not None and not root.handlers else []
    loggers = [
        root,
        *(found for name in LIBRARIES if not (found := logging.getLogger(name)).propagate),
    ]

    def show_and_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        details = {"category": category.__name__, "place": f"{filename}:{lineno}"}
        handler.handle(_warning_record(str(message), filename, lineno, details))
        show(message, category, filename, lineno, file, line)

    for logger in loggers:
        logger.addHandler(handler)
    for resort in silent:
        root.addHandler(
            resort
        )  # where there is a handler of ours, Python no longer prints warnings by itself
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    warnings.showwarning = show_and_log
    try:
        yield
    finally:
        if warnings.showwarning is show_and_log:
            warnings.showwarning = show
        LOGGER.setLevel(level)
        for resort in silent:
            root.removeHandler(resort)
        for logger in loggers:
            logger.removeHandler(handler)


def _warning_record(
    message: str, filename: str, lineno: int, details: dict[str, str]
) -> logging.LogRecord:
    record = logging.LogRecord(
        "py.warnings", logging.WARNING, filename, lineno, message, None, None
    )
    record.event, record.details = "warning", details
    return record

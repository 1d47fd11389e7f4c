"""Hooks into a running loop, and signals, which wait for the end of a step."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nemorl.checks import closest, require, short, warn
from nemorl.rollout.calls import exit_is_error
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout
from nemorl.runtime.store.state import RunView


class StopTraining(Exception):
    """Raised by a callback to end the run after this step, with a last checkpoint."""


class Callback:
    """Base class whose hooks do nothing: override the ones that you need.

    Step 5 is over when `run.state.step` is 5; the start of a run is step 0.

    >>> class PrintReward(Callback):
    ...     def on_step_end(self, trainer, step, metrics):
    ...         print(step, metrics["reward"])
    >>> notify([PrintReward()], "on_step_end", None, 5, {"reward": 0.5})
    5 0.5
    """

    def on_train_begin(self, trainer: RunView) -> None:
        """Before the first step, also after a resume."""

    def on_epoch_begin(self, trainer: RunView, epoch: int) -> None:
        """Before the first step of a pass over the data (counted from 0), and after a resume."""

    def on_step_begin(self, trainer: RunView, step: int) -> None:
        """Before step `step`."""

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """After step `step`, with its metrics."""

    def on_epoch_end(self, trainer: RunView, epoch: int, metrics: dict[str, float]) -> None:
        """After the last step of a pass over the data, with its metrics."""

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """After a validation of the weights of this step."""

    def on_samples(self, trainer: RunView, step: int, samples: list[dict[str, Any]]) -> None:
        """With a few responses: prompt and response as text, if known also reward, tokens,
        logprobs, advantages.
        """

    def on_checkpoint(self, trainer: RunView, step: int, path: Path) -> None:
        """After a checkpoint has been written."""

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        """At the end of the run, with its last metrics; not after an error."""

    def on_exception(self, trainer: RunView, error: BaseException) -> None:
        """After an error; `trainer` is as after the last whole step."""

    def close(self) -> None:
        """Last, also after an error, perhaps twice: free files and threads."""


def check_callbacks(callbacks: Any) -> None:
    """Raise ValueError for what is no callback, or has a hook that is never called."""
    remedy = "class Mine(nemorl.Callback): def on_step_end(self, trainer, step, metrics): …"
    several = isinstance(callbacks, Sequence)
    require(several, "callbacks", "must be a list of them", callbacks, "put it in brackets")
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    plain = {name.replace("_", ""): name for name in hooks}
    spellings = plain | {x[2:]: name for x, name in plain.items() if "_" in name[3:]}
    for callback in callbacks:
        require(
            isinstance(callback, Callback),
            "callbacks",
            "must be instances of classes derived from nemorl.Callback",
            callback,
            remedy,
        )
        for name in dir(callback):
            meant = spellings.get(name.replace("_", "").lower())  # onStepEnd, step_end
            if (name.startswith("on_") or meant) and name not in hooks:
                hint = closest(meant or name, hooks) or "."
                raise ValueError(
                    f"callbacks must have hooks that are called, but {type(callback).__name__} has"
                    f" {name}{hint} The hooks are {', '.join(hooks)}"
                )


def notify(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call a hook of every callback, and then raise their first error, if any."""
    error: Exception | None = None
    for callback in callbacks:
        try:
            with exit_is_error(f"{type(callback).__name__}.{hook}"):
                getattr(callback, hook)(*args)
            if args and isinstance(args[-1], dict):
                _as_numbers(args[-1], f"{type(callback).__name__}.{hook}")
        except Exception as failure:
            if error is None or isinstance(error, StopTraining):
                error = failure
    if error is not None:
        raise error


def _as_numbers(metrics: dict[str, Any], who: str) -> None:
    for name, value in list(metrics.items()):
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            del metrics[name]
            raise ValueError(
                f"{who} must add numbers to metrics, but {name} is {short(value)}: use logging"
            ) from None


def notify_of_error(callbacks: Sequence[Callback], trainer: RunView, error: BaseException) -> None:
    """Call `on_exception` of every callback; its own errors become notes."""
    for callback in callbacks:
        try:
            callback.on_exception(trainer, error)
        except Exception as failure:
            error.add_note(f"{type(callback).__name__}.on_exception failed as well: {failure!r}")


@contextmanager
def closing(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Close every callback after the block, the last first."""
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.close)
        yield


class Terminated(SystemExit):
    """SIGTERM, as an exception."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class _Signals:
    waits: Callable[[], bool] = bool
    """Whether a signal waits now; `bool()` is False."""
    pending: int | None = None


@contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the block, and it and Ctrl-C wait for
    `update_in_progress`, unless they are handled.
    """
    defaults = ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler))
    with ExitStack() as stack:
        for number, before in defaults:
            if _in_main_thread() and signal.getsignal(number) is before:
                signal.signal(number, _handle)
                stack.callback(signal.signal, number, before)
        yield


@contextmanager
def update_in_progress(begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Have a signal that comes after `begun()` wait for the end of the block, and raise there; a
    second one raises at once. Of nested blocks the outer one counts.
    """
    nested = _Signals.waits is not bool
    if nested or not _in_main_thread():  # signals do not arrive in other threads
        yield
        return
    _Signals.waits = begun
    try:
        yield
    except (WorkerDied, WorkerTimeout) as error:  # or new ranks would start
        if (number := _leave()) is not None:
            warn(str(error))
            _raise(number, error)
        raise
    finally:
        number = _leave()
    if number is not None:
        _raise(number)


def _leave() -> int | None:
    """Let signals raise again, and return one that waits."""
    number, _Signals.pending, _Signals.waits = _Signals.pending, None, bool
    return number


def _handle(number: int, frame: FrameType | None) -> None:
    if _Signals.pending is not None or not _Signals.waits():
        _leave()
        _raise(number)
    _Signals.pending = number
    with suppress(OSError):  # os.write, as this may interrupt a print
        os.write(2, b"\nthe run ends after this step; a second signal (Ctrl-C) ends it at once, "
                    b"and the step is lost\n")  # fmt: skip


def _raise(number: int, cause: BaseException | None = None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt from cause
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the last checkpoint
    raise Terminated from cause


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


os.register_at_fork(after_in_child=_leave)  # a forked child has no step to finish

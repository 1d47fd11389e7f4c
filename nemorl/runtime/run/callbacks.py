"""Hooks into a running loop.

Callbacks observe; whoever wants to end a run early raises `StopTraining`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemorl.runtime.run.state import Run


class StopTraining(Exception):
    """Raised by a callback to end the run after the present step: in good order, with its last
    checkpoint and plots.
    """


class Callback:
    """Derive from this and override what you want to see; every hook does nothing by default.

    Steps are counted from 1: step 5 is over when `run.state.step` is 5. What belongs to the start
    of a run has step 0.

    >>> class PrintReward(Callback):
    ...     def on_step_end(self, trainer, step, metrics):
    ...         print(step, metrics["reward"])
    >>> notify([PrintReward()], "on_step_end", None, 5, {"reward": 0.5})
    5 0.5
    """

    def on_train_begin(self, trainer: Run) -> None:
        """Once, before the first step (after a resume: before the first one that follows)."""

    def on_epoch_begin(self, trainer: Run, epoch: int) -> None:
        """Before the first step that begins in this pass over the data (counted from 0); after a
        resume also of one that is under way.

        Where a step takes more rows than there are, the passes that lie within it begin and end
        after it, each in its turn.
        """

    def on_step_begin(self, trainer: Run, step: int) -> None:
        """Before step `step`."""

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        """After step `step`, with what was measured in it.

        Every callback is told, also where one of them raises.
        """

    def on_epoch_end(self, trainer: Run, epoch: int, metrics: dict[str, float]) -> None:
        """After the last step of a pass over the data, with the metrics of that step.

        A pass that the end of the run cuts off has no end.
        """

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        """After a validation of the weights as they are after step `step`."""

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        """A few responses of step `step`: dicts with at least prompt and response (text), where
        known also reward, tokens, logprobs, advantages.
        """

    def on_checkpoint(self, trainer: Run, step: int, path: Path) -> None:
        """After the checkpoint of step `step` has been written to `path`."""

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        """Once, when the run has come to its end, with its final metrics.

        Not after an error: see `close`.
        """

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """When a step, a validation or a callback has raised, before the error goes on its way;
        `trainer` stands after the last whole step.
        """

    def close(self) -> None:
        """The last call, whether the run ended well or raised: give back files, threads, the
        terminal. May come more than once.
        """


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


REPORTS = ("on_step_end", "on_validation_end", "on_samples")
"""Hooks that tell what was measured: whoever records it is told, though another callback fails."""


def notify(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call one hook of every callback, in order. An exception in a callback ends the run, as it
    should; in `REPORTS` once all of them are told.

    >>> notify([Callback()], "on_stop")
    Traceback (most recent call last):
    ValueError: hook must be one of on_train_begin, on_epoch_begin, on_step_begin, on_step_end, on_epoch_end, on_validation_end, on_samples, \
on_checkpoint, on_train_end, on_exception, but it is 'on_stop'
    """
    if hook not in HOOKS:
        raise ValueError(f"hook must be one of {', '.join(HOOKS)}, but it is {hook!r}")
    stop: BaseException | None = None
    for callback in callbacks:
        try:
            getattr(callback, hook)(*args)
        except StopTraining as error:
            stop = stop or error  # the others are told all the same
        except BaseException as error:
            if hook not in REPORTS:
                raise
            if stop is None or isinstance(stop, StopTraining):
                stop = error
            else:
                stop.add_note(f"{type(callback).__name__}.{hook} failed as well: {error!r}")
    if stop is not None:
        raise stop


def notify_of_error(callbacks: Sequence[Callback], trainer: Run, error: BaseException) -> None:
    """Tell every callback of an error through `on_exception`.

    What one of them raises in turn becomes a note on it, and hides it from nobody.
    """
    for callback in callbacks:
        try:
            callback.on_exception(trainer, error)
        except Exception as failure:
            error.add_note(f"{type(callback).__name__}.on_exception failed as well: {failure!r}")


@contextmanager
def closing(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Close every callback at the end of the block, the last one first, also when the block (or the
    closing of another one) raises.

    >>> class Goodbye(Callback):
    ...     def close(self):
    ...         print("closed")
    >>> with closing([Goodbye()]):
    ...     print("training")
    training
    closed
    """
    if not callbacks:
        yield
        return
    first, *rest = callbacks
    try:
        with closing(rest):
            yield
    finally:
        first.close()

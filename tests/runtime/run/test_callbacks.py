import pytest
import torch

from nemorl.runtime.watch.callbacks import (
    Callback,
    StopTraining,
    check_callbacks,
    closing,
    notify,
    notify_of_error,
)
from tests.runtime.tiny import tiny_run

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Recorder(Callback):
    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def on_step_end(self, trainer, step, metrics):
        self.log.append(f"{self.name} {step} {metrics}")

    def close(self):
        self.log.append(f"{self.name} closed")
        if self.fails:
            raise RuntimeError(f"{self.name} failed")


def test_every_callback_is_closed_when_closing_one_raises():
    log: list[str] = []
    with (
        pytest.raises(RuntimeError, match=r"b failed"),
        closing([Recorder("a", log), Recorder("b", log, fails=True)]),
    ):
        pass
    assert log == ["b closed", "a closed"]


def test_an_error_in_on_exception_hides_nothing_from_nobody():
    class Clumsy(Callback):
        def on_exception(self, trainer, error):
            error.add_note("told")
            raise ZeroDivisionError("oh no")

    error = RuntimeError("a mishap")
    notify_of_error([Clumsy(), Clumsy()], tiny_run(), error)
    failed = "Clumsy.on_exception failed as well: ZeroDivisionError('oh no')"
    assert error.__notes__ == ["told", failed] * 2


class Fails(Callback):
    def __init__(self, error: BaseException) -> None:
        for hook in HOOKS:
            setattr(self, hook, self.fail)
        self.error = error

    def fail(self, *_):
        raise self.error


class Hears(Callback):
    def __init__(self) -> None:
        self.heard = []
        for hook in HOOKS:
            setattr(self, hook, self.hear)

    def hear(self, *_):
        self.heard.append(1)


@pytest.mark.parametrize("hook", sorted({*HOOKS} - {"on_exception"}))
def test_every_callback_is_called_though_one_fails(hook):
    error, last = RuntimeError(), Hears()
    failing = [Fails(StopTraining()), Fails(error), Fails(ValueError("another")), last]
    with pytest.raises(RuntimeError) as caught:
        notify(failing, hook, tiny_run())
    assert caught.value is error and last.heard


def test_an_interrupt_ends_it_at_once():
    last = Hears()
    with pytest.raises(KeyboardInterrupt):
        notify([Fails(KeyboardInterrupt()), last], "on_train_end", tiny_run(), {})
    assert not last.heard


def test_what_a_hook_adds_to_the_metrics_is_a_number():
    class Adds(Callback):
        def on_step_end(self, trainer, step, metrics):
            metrics |= {"one": torch.tensor(1), "mood": "good"}

    metrics = {"reward": 0.5}
    with pytest.raises(ValueError, match=r"Adds\.on_step_end must add numbers .* mood is 'good'"):
        notify([Adds(), Recorder("a", [])], "on_step_end", tiny_run(), 1, metrics)
    assert metrics == {"reward": 0.5, "one": 1.0}


def named(name: str) -> Callback:
    return type("Typo", (Callback,), {name: lambda self, trainer, step, metrics: None})()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Callback(), r"callbacks must be a list of them, but it is <.*brackets"),
        ([print], "callbacks must be instances of classes derived from"),
        *(
            ([named(name)], rf"Typo has {name}; did you mean on_step_end\?")
            for name in ("on_step_ends", "onStepEnd", "step_end", "on_stepend")
        ),
    ],
)
def test_what_would_never_be_called_is_refused(callbacks, message):
    with pytest.raises(ValueError, match=message):
        check_callbacks(callbacks)

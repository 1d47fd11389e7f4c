"""What is said while engines and ranks start."""

import io
from functools import partial

import pytest
from rich.console import Console

from nemorl import GenerationConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.watch import log as module
from nemorl.runtime.watch.log import waiting, waiting_for_engines, waiting_for_ranks


def test_a_line_before_and_one_after(capsys: pytest.CaptureFixture[str]):
    config = GenerationConfig(backend="vllm", num_replicas=2, log_dir="runs/mine/logs")
    with waiting_for_engines(config):
        said = capsys.readouterr().err
        assert said == "starting 2 x vllm through Ray, whose logs are in runs/mine/logs …\n"
    assert capsys.readouterr().err == "ready after 0 s\n"
    with waiting_for_ranks(ParallelPlan(dp_shard=2, param_dtype="float32"), "Ray actors"):
        said = capsys.readouterr().err
        assert said == "training on 2 devices (dp_shard 2; float32), Ray actors …\n"


def test_nothing_where_nothing_starts_or_nothing_shall_be_said(capsys: pytest.CaptureFixture[str]):
    with waiting_for_engines(GenerationConfig()), waiting("starting", quiet=True):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_spinner_that_goes(monkeypatch: pytest.MonkeyPatch):
    written = io.StringIO()
    terminal = partial(Console, file=written, force_terminal=True)
    monkeypatch.setattr(module, "Console", lambda stderr, **options: terminal(**options))
    with pytest.raises(KeyboardInterrupt), waiting("starting engines"):
        assert "\x1b[?25l" in written.getvalue()
        raise KeyboardInterrupt
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")

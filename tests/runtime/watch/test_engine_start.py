"""What is said while engines start, and the ranks of a model that is spread."""

import io
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from nemorl import GenerationConfig
from nemorl.parallel.config import BackendConfig, ModelConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.group import Status
from nemorl.runtime.ranks.make import make_trainer
from nemorl.runtime.start.registry import TRAINING_BACKENDS
from nemorl.runtime.watch.engine_start import STAGES, stages, told, told_of_ranks, waiting
from tests.tiny_models import tiny_model

DEADLINE_S = 120.0


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_line_before_and_one_after(capsys: pytest.CaptureFixture[str]):
    with told(GenerationConfig(backend="vllm", num_replicas=2, log_dir="runs/mine/logs")):
        assert (
            capsys.readouterr().err
            == "starting 2 x vllm through Ray, whose logs are in runs/mine/logs …\n"
        )
    assert capsys.readouterr().err == "ready after 0 s\n"
    with told(GenerationConfig(backend="vllm")):
        assert capsys.readouterr().err == "starting vllm in this process …\n"
    capsys.readouterr()
    with told_of_ranks(ParallelPlan(dp_shard=2), "processes of this machine", dict):
        assert (
            capsys.readouterr().err
            == "training on 2 devices (dp_shard 2; float32), processes of this machine …\n"
        )


def test_nothing_where_nothing_starts_or_nothing_shall_be_said(capsys: pytest.CaptureFixture[str]):
    with told(GenerationConfig()), told(GenerationConfig(backend="vllm"), quiet=True):
        pass
    with waiting(
        Console(stderr=True, quiet=True),
        lambda: pytest.fail("nobody asks"),
        look_s=0.001,
        line_s=0.001,
    ):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_in_a_log_a_line_now_and_then_and_none_afterwards():
    """Also where it could not be found out for once what is going on."""
    written, asked = io.StringIO(), 0

    def doing() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("the ranks are being ended")
        return "ranks reading weights"

    with waiting(Console(file=written), doing, line_s=0.01):
        soon(lambda: written.getvalue().count("\n") >= 2)
    told = written.getvalue()
    assert all(
        re.fullmatch(r"ranks reading weights, for \d+ s now …", line) for line in told.splitlines()
    )
    time.sleep(0.1)
    assert written.getvalue() == told


def test_in_a_terminal_a_clock():
    written = io.StringIO()
    with waiting(
        Console(file=written, force_terminal=True, width=100),
        lambda: "ranks reading weights",
        look_s=0.01,
    ):
        soon(
            lambda: (
                re.search(r"ranks reading weights (\x1b\[\d+m)?\d:\d\d:\d\d", written.getvalue())
                is not None
            )
        )
    assert "\n" not in written.getvalue().rpartition("\x1b[2K")[2], "it is wiped out"


def test_what_ends_the_wait_goes_on_its_way():
    with (
        pytest.raises(KeyboardInterrupt),
        waiting(Console(file=io.StringIO(), force_terminal=True), lambda: "", look_s=0.01),
    ):
        raise KeyboardInterrupt


def status(rank: int, *functions: str, phase: str = "setup") -> Status:
    frames = tuple(
        f"parallel/dtensor/build.py:{line} {name}" for line, name in enumerate(functions)
    )
    return Status(rank=rank, step=0, phase=phase, seconds=1.0, frames=frames)


def test_what_ranks_are_at():
    reading = status(0, "read", "fill", "load_folder", "build", "setup")
    assert stages({0: reading, 1: reading}, 2) == "ranks reading weights"
    assert (
        stages({0: reading, 2: status(2, phase="waiting for a call")}, 4)
        == "ranks: 1 reading weights, 2 starting, 1 ready"
    )
    assert stages({0: status(0, "setup")}, 1) == "ranks setting up"


def test_the_stages_are_functions_that_there_are():
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(__file__).parents[3].glob("nemorl/**/*.py")
    )
    for name in STAGES:
        assert f"def {name}(" in text or f"{name}(name, " in text, name


class HeldUp:
    """Takes until a file is there to read its weights."""

    step = 0

    def setup(self, config: BackendConfig) -> None:
        self.load_folder()

    def load_folder(self) -> None:
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.01)

    def shutdown(self) -> None:
        pass


def test_what_real_ranks_are_at_is_known_while_they_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TRAINING_BACKENDS, "held_up", HeldUp)
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    tiny_model().save_pretrained(tmp_path / "model")
    plan, device = ParallelPlan(dp_shard=2), TrainerConfig(device="cpu")
    trainer = make_trainer(BaseConfig(trainer=device), "held_up", plan, RuntimeConfig(), tmp_path)
    assert stages(trainer.statuses(), 2) == "ranks starting"
    config = BackendConfig(
        model=ModelConfig(path=str(tmp_path / "model")), trainer=device, parallel=plan
    )
    waiter = threading.Thread(target=trainer.setup, args=(config,))
    waiter.start()
    try:
        soon(lambda: stages(trainer.statuses(), 2) == "ranks reading weights")
    finally:
        (tmp_path / "gate").touch()
        waiter.join(DEADLINE_S)
        trainer.shutdown()
    assert not waiter.is_alive() and trainer.statuses() == {}

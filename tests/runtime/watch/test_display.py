import io
import os
import pty
import re
import select
import signal
import sys
import termios
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nemorl.runtime.watch import display
from nemorl.runtime.watch.callbacks import Callback, closing
from nemorl.runtime.watch.display import LiveDisplay, PlainDisplay, make_display
from nemorl.runtime.watch.metrics import LABELS, number
from tests.runtime.tiny import tiny_run

METRICS = {
    "reward": 0.8125,
    "accuracy": 0.75,
    "loss": -0.0123456,
    "kl": 0.004,
    "entropy": 1.2,
    "response_length": 4.5,
    "token_mult_prob_error": 1.02,
    "lr": 3e-4,
    "tokens_per_second": 12345.0,
    "trainer/mfu": 0.431,
    "trainer/memory_gb": 61.5,
    "grad_norm": 1.0,
}
SAMPLES = [
    {"prompt": "12+34=", "response": "46", "reward": 1.0},
    {"prompt": "9+9=\n", "response": "a\nlong [red]answer[/] " * 20},
]


class FakeTime:
    """A clock that the test winds."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(display, "time", fake)
    return fake


def plain_run(clock: FakeTime, *, steps: int, seconds_per_step: float, first: int = 0) -> list[str]:
    file = io.StringIO()
    shown = PlainDisplay(steps, Console(file=file, width=60))
    run = tiny_run(step=first)
    shown.on_train_begin(run)
    for step in range(first + 1, steps + 1):
        clock.now += seconds_per_step
        shown.on_step_end(run, step, METRICS)
    return file.getvalue().splitlines()


def fed(console: Console) -> LiveDisplay:
    """A live display that has seen some steps, without a terminal of its own."""
    shown = LiveDisplay(140, console)
    shown.on_validation_end(tiny_run(), 0, {"accuracy": 0.42})
    for step in range(1, 51):
        shown.on_step_end(tiny_run(step=step), step, METRICS | {"reward": step / 50})
    shown.on_validation_end(tiny_run(), 50, {"accuracy": 0.934})
    shown.on_samples(tiny_run(), 50, SAMPLES)
    return shown


@given(st.floats(-1e14, 1e14).filter(lambda value: abs(value) > 1e-30))
def test_numbers_have_three_significant_digits(value):
    text = number(value)
    assert len(text) <= 9
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    read = float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)
    assert read == pytest.approx(value, rel=0.00501)


def test_plain_lines_say_it_all_and_are_aligned(clock):
    lines = plain_run(clock, steps=140, seconds_per_step=2.0)
    assert re.sub(" +", " ", lines[9]) == (
        "step 10/140 reward 0.812 accuracy 0.75 KL 0.004 entropy 1.2 length 4.5 gap 1.02 lr 3e-4"
        " 12.3k tok/s 0.431 MFU 4:20 left"
    )
    assert {line.index("accuracy") for line in lines} == {lines[0].index("accuracy")}


@pytest.mark.parametrize(
    ("steps", "seconds", "most", "least"),
    [
        (140, 2.0, 140, 140),
        (140, 0.1, 16, 13),
        (20_000, 0.05, 1002, 500),
        (2_000, 40.0, 2000, 2000),
        (3, 0.0, 2, 2),
    ],
)
def test_plain_output_stays_readable_however_long_the_run(clock, steps, seconds, most, least):
    lines = plain_run(clock, steps=steps, seconds_per_step=seconds)
    assert least <= len(lines) <= most
    assert lines[-1].startswith(f"step {steps}/{steps}"), "the last step is always there"


def test_plain_output_of_a_resumed_run(clock):
    lines = plain_run(clock, steps=4, seconds_per_step=1.0, first=2)
    assert lines[0] == "continuing after step 2"
    assert lines[2].endswith("0:00 left"), "time left goes by the steps of this process"


def test_plain_validation_shows_samples_as_they_are(clock):
    file = io.StringIO()
    shown = PlainDisplay(140, Console(file=file))
    shown.on_samples(tiny_run(), 4, SAMPLES[:1])
    shown.on_validation_end(tiny_run(), 5, {"accuracy": 0.9})
    shown.on_samples(tiny_run(), 5, SAMPLES)  # in the order of the loop
    shown.on_train_end(tiny_run(step=140), {"accuracy": 0.97})
    lines = file.getvalue().splitlines()
    assert lines[0] == "step   5/140  validation  accuracy 0.9"
    assert lines[1] == "    12+34=  ->  46  (reward 1)"
    assert lines[2].startswith("    9+9=  ->  a long [red]answer[/] a long")
    assert lines[3] == "step 140/140  done in 0:00  accuracy 0.97"
    assert len(lines) == 4 and "…" in lines[2]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_live_panel_fits_its_terminal(width):
    lines = drawn(fed(terminal(width))).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for name, label in LABELS.items():
        assert label in text or name not in METRICS or name == "loss"
    assert "loss" not in text, "beside a reward it is 0 but for rounding errors"
    assert "50/140" in text and "grad_norm" not in text
    for shown in ("0.42 → 0.934", "12.3k", "12+34=", "[red]") if width >= 80 else ():
        assert shown in text


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def drawn(shown: LiveDisplay) -> str:
    shown.console.print(shown.render())
    return shown.console.file.getvalue()


def test_pairs_are_shown_as_what_was_chosen_and_what_was_not():
    pairs = [{"prompt": "12+34=", "chosen": "46", "rejected": "47", "margin": -0.25}]
    shown = LiveDisplay(10, terminal())
    shown.on_samples(tiny_run(), 1, pairs)
    shown.on_step_end(tiny_run(step=1), 1, {"loss": 0.5, "margin": 0.125})
    text = drawn(shown)
    assert "46 rather than 47" in text and "-0.25" in text and "0.125" in text


def test_samples_are_the_best_and_the_worst_of_a_group():
    rewards = {"46": 1.0, "45": 0.0, "4 6": 0.25, "47": None, "46 is it": 0.5}
    asked = {"group": 3, "prompt": "12+34="}
    group = [{**asked, "response": text, "reward": value} for text, value in rewards.items()]
    shown = LiveDisplay(10, terminal())
    shown.on_samples(tiny_run(), 1, [*group, {**group[0], "group": 4}])
    assert [sample["response"] for sample in shown.samples] == ["46", "46 is it", "45", "47"]
    assert drawn(shown).count("12+34=") == 1, "the prompt of a group is shown once"


@pytest.mark.parametrize(
    ("mode", "terminal", "term", "expected"),
    [
        ("auto", True, "xterm", LiveDisplay),
        ("auto", False, "xterm", PlainDisplay),
        ("auto", True, "dumb", PlainDisplay),
        ("plain", True, "xterm", PlainDisplay),
        ("live", True, "xterm", LiveDisplay),
        ("none", True, "xterm", Callback),
    ],
)
def test_display_that_is_chosen(mode, terminal, term, expected):
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=file, force_terminal=terminal, _environ={"TERM": term})
    assert type(make_display(mode, total_steps=3, console=console)) is expected


def train(shown: Callback, ending: str) -> None:
    run = tiny_run()
    shown.on_train_begin(run)
    for step in range(1, 41):
        shown.on_samples(run, step, SAMPLES)
        shown.on_step_end(run, step, METRICS)
        if step == 35:
            print("a word from the loop")
            if ending == "raises":
                raise RuntimeError("out of luck")
            if ending == "interrupted":
                signal.raise_signal(signal.SIGINT)
            if ending == "killed":
                shown.live.refresh()
                os.kill(os.getpid(), signal.SIGKILL)
    shown.on_train_end(tiny_run(step=40), {})


def in_a_terminal(ending: str) -> tuple[str, bool]:
    """Return what a run writes to a pseudo-terminal, and whether that keeps its settings."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 110))
    before = termios.tcgetattr(theirs)
    pid = os.fork()
    if pid == 0:
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            sys.stdout = sys.stderr = terminal
            environment = {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"}
            console = Console(file=terminal, _environ=environment)
            shown = make_display("auto", total_steps=40, console=console)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                with closing([shown]):
                    train(shown, ending)
            except BaseException:
                traceback.print_exc()
            terminal.flush()
        os._exit(0)
    os.set_blocking(ours, False)
    output, ended = b"", False
    while not ended or select.select([ours], [], [], 0)[0]:
        ended = ended or os.waitpid(pid, os.WNOHANG) != (0, 0)
        if select.select([ours], [], [], 0.1)[0]:
            output += os.read(ours, 65536)
    kept = termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
    return output.decode(), kept


@pytest.mark.parametrize("ending", ["to the end", "raises", "interrupted", "killed"])
def test_terminal_is_as_it_was(ending):
    output, settings_kept = in_a_terminal(ending)
    assert settings_kept
    assert "╭─" in output and "0.812" in output, "a live panel was drawn"
    assert re.findall(r"\x1b\[\?25[hl]", output)[-1] == "\x1b[?25h", "the cursor is there"
    assert "\x1b[?1049" not in output, "no other screen, which would take the history along"
    assert "a word from the loop" in output or ending == "killed"
    if ending == "raises":
        assert output.rindex("╰─") < output.rindex("out of luck"), "the panel is finished first"
    assert "KeyboardInterrupt" in output or ending != "interrupted"
    if ending == "to the end":
        assert "40/40" in output[output.rindex("╭─") :], "the last panel shows the last step"

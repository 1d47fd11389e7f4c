"""What a person sees while a run goes: a live table in a terminal, one plain line a step elsewhere,
or nothing.
"""

import atexit
import math
import threading
import time
from collections import deque
from itertools import pairwise
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.state import Run

LABELS = {
    "reward": "reward",
    "accuracy": "accuracy",
    "loss": "loss",
    "margin": "margin",
    "kl": "KL",
    "entropy": "entropy",
    "response_length": "length",
    "token_mult_prob_error": "gap",
    "lr": "lr",
    "tokens_per_second": "tok/s",
    "trainer/mfu": "MFU",
    "trainer/memory_gb": "mem GB",
}
"""The metrics that are shown, where a run has them, in this order and under these names."""
COSTS = (
    "tokens_per_second",
    "trainer/mfu",
    "trainer/memory_gb",
)  # a plain line ends with the first two and leaves the last out


def make_display(
    mode: Literal["auto", "live", "plain", "none"],
    *,
    total_steps: int | None = None,
    console: Console | None = None,
) -> Callback:
    """The display that `run.display` asks for; auto: live in a terminal that can do it, plain
    elsewhere.
    """
    console = console or Console()
    if mode == "none":
        return Callback()
    capable = (
        console.is_terminal
        and not console.is_dumb_terminal
        and console.encoding.lower().startswith("utf")
    )
    return (
        LiveDisplay(total_steps, console)
        if mode == "live" or (mode == "auto" and capable)
        else PlainDisplay(total_steps, console)
    )


def number(value: float) -> str:
    """Three significant digits.

    >>> [number(x) for x in (0.5, 12345, 999.9, -0.01234, 3e-5, 0, float("nan"))]
    ['0.500', '12.3k', '1.00k', '-0.0123', '3e-5', '0', 'nan']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.3g}")
    if abs(rounded) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit in ("", "k", "M", "G"):
        if abs(rounded) < 1000:
            return f"{rounded:#.3g}".rstrip(".") + unit
        rounded /= 1000
    return f"{rounded:#.3g}".rstrip(".") + "T"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours and days where there are any.

    >>> [duration(x) for x in (5, 62, 3723, 180000)]
    ['0:05', '1:02', '1:02:03', '2d 2:00:00']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def shorten(text: str, width: int) -> str:
    """A text on one line of at most `width` characters; its middle is what goes.

    >>> shorten("a long text about nothing", 13)
    'a long … hing'
    """
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    end = max(0, (width - 3) * 2 // 5)
    return (
        f"{line[: width - 3 - end].rstrip()} … {line[len(line) - end :].lstrip()}"
        if width > 3
        else line[:width]
    )


def sparkline(values: list[float], width: int) -> str:
    """The course of a value as a row of blocks between its own minimum and maximum.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(
        "▁▂▃▄▅▆▇█"[round((mean - low) / (high - low) * 7)] if high > low else "▄" for mean in means
    )


def answer_of(sample: dict[str, Any]) -> tuple[str, str, float | None]:
    """What a sample answers, and the name and value of its verdict: its reward, or the margin of a
    preference pair.

    >>> answer_of({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5})
    ('2 rather than 3', 'margin', 0.5)
    """
    if "chosen" in sample:
        return f"{sample['chosen']} rather than {sample['rejected']}", "margin", sample["margin"]
    reward = sample.get("reward")
    return (
        str(sample.get("response", "")),
        "reward",
        reward if isinstance(reward, int | float) else None,
    )


class Trend:
    """The course of one metric in at most 256 points, each the mean of equally many steps."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self.pending: list[float] = []
        self.steps_per_point = 1

    def add(self, value: float) -> None:
        self.pending.append(value)
        if len(self.pending) < self.steps_per_point:
            return
        self.points.append(sum(self.pending) / len(self.pending))
        self.pending = []
        if len(self.points) == 256:
            self.points = [
                (a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)
            ]
            self.steps_per_point *= 2


class Clock:
    """Steps done and to do, and the time that they took and will take, going by the latest ones."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.started = time.monotonic()
        self.recent: deque[tuple[int, float]] = deque(maxlen=33)

    def at(self, step: int) -> None:
        self.step = step
        self.recent.append((step, time.monotonic()))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds to the end; None where the end or the pace is not known yet."""
        if self.total_steps is None or len(self.recent) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self.recent[0], self.recent[-1]
        seconds_per_step = (last_time - first_time) / max(1, last_step - first_step)
        return max(
            0.0, seconds_per_step * (self.total_steps - last_step) - (time.monotonic() - last_time)
        )

    def label(self) -> str:
        """`step  7/140`, of constant width; `step 7` where the end is not known."""
        return (
            f"step {self.step}"
            if self.total_steps is None
            else f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}"
        )


class PlainDisplay(Callback):
    """One line a step, but at most one a second; in a run of thousands of steps every k-th step,
    and at least one line in half a minute.
    """

    def __init__(self, total_steps: int | None = None, console: Console | None = None) -> None:
        self.console = console or Console()
        self.clock = Clock(total_steps)
        self.printed = -math.inf
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(self, trainer: Run) -> None:
        self.clock = Clock(self.clock.total_steps)
        self.clock.at(trainer.state.step)
        if trainer.state.step:
            self._print(f"going on after step {trainer.state.step}")

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.clock.at(step)
        since, total = time.monotonic() - self.printed, self.clock.total_steps
        due = since >= 1 and (step % max(1, (total or 0) // 1000) == 0 or since >= 30)
        if due or step == total:
            left = self.clock.left
            self._print(
                self._line(metrics) + (f"  {duration(left)} left" if left is not None else "")
            )
            self.printed = time.monotonic()

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        self.samples = samples[:3]

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        self.clock.step = step
        self._print(self._line(metrics, "validation"))
        for sample in self.samples:
            answer, name, value = answer_of(sample)
            verdict = f"  ({name} {number(value)})" if value is not None else ""
            self._print(
                f"    {shorten(str(sample.get('prompt', '')), 50)}  -> "
                f" {shorten(answer, 70)}{verdict}"
            )

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        self.clock.step = trainer.state.step
        self._print(self._line(metrics, f"done in {duration(self.clock.elapsed)}"))

    def _line(self, metrics: dict[str, float], *words: str) -> str:
        values = [
            f"{label} {number(metrics[name]):<8}"
            for name, label in LABELS.items()
            if name in metrics and name not in COSTS
        ]
        speed = [
            f"{number(metrics[name]):>5} {LABELS[name]}" for name in COSTS[:2] if name in metrics
        ]
        return "  ".join([self.clock.label(), *words, *values, *speed]).rstrip()

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


class LiveDisplay(Callback):
    """A panel that is drawn again at most 4 times a second, by a thread that spends less than 1 %
    of the time on it.

    The cursor is never hidden, so that even a killed process leaves the terminal as it was.
    """

    def __init__(self, total_steps: int | None = None, console: Console | None = None) -> None:
        self.console = console or Console()
        self.clock = Clock(total_steps)
        self.title = "nemorl"
        self.latest: dict[str, float] = {}
        self.trends: dict[str, Trend] = {}
        self.validations: list[tuple[int, dict[str, float]]] = []  # the first and the last one
        self.samples: list[dict[str, Any]] = []
        self.checkpoint: int | None = None
        self.lock = threading.Lock()  # the thread that draws reads what the loop's thread writes
        self.finished = threading.Event()
        self.live: Live | None = None
        self.thread: threading.Thread | None = None

    def on_train_begin(self, trainer: Run) -> None:
        self.close()
        self.title = trainer.directory.resolve().name if trainer.directory else "nemorl"
        self.clock = Clock(self.clock.total_steps)
        self.clock.at(trainer.state.step)
        self.finished.clear()
        self.live = Live(console=self.console, get_renderable=self.render, auto_refresh=False)
        self.live.start()
        self.console.show_cursor(True)
        atexit.register(self.close)
        self.thread = threading.Thread(
            target=self._draw, args=(self.live,), name="nemorl-display", daemon=True
        )
        self.thread.start()

    def on_step_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        with self.lock:
            self.clock.at(step)
            self.latest = {name: metrics[name] for name in LABELS if name in metrics}
            for name, value in self.latest.items():
                self.trends.setdefault(name, Trend()).add(value)

    def on_validation_end(self, trainer: Run, step: int, metrics: dict[str, float]) -> None:
        with self.lock:
            self.validations = [*self.validations[:1], (step, metrics)]

    def on_samples(self, trainer: Run, step: int, samples: list[dict[str, Any]]) -> None:
        with self.lock:
            self.samples = samples[:4]

    def on_checkpoint(self, trainer: Run, step: int, path: Any) -> None:
        with self.lock:
            self.checkpoint = step

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        self.close()

    def close(self) -> None:
        if self.live is None:
            return
        self.finished.set()
        if self.thread is not None:
            self.thread.join()
        live, self.live = self.live, None
        live.stop()  # draws once more
        atexit.unregister(self.close)

    def _draw(self, live: Live) -> None:
        cost = 0.0
        while not self.finished.wait(min(max(0.25, 100 * cost), 10.0)):
            start = time.perf_counter()
            live.refresh()
            cost = time.perf_counter() - start

    def render(self) -> Panel:
        """The panel as it is now."""
        with self.lock:
            width = self.console.width - 6
            parts: list[Any] = [self._progress(), Text(), self._metrics(width)]
            if self.validations:
                parts += [Text(), self._validation()]
            if self.samples:
                parts += [Text(), self._samples(width)]
        return Panel(
            Group(*parts),
            title=f"[bold]{self.title}[/]",
            title_align="left",
            border_style="blue",
            padding=(1, 2),
        )

    def _progress(self) -> Table:
        clock, left = self.clock, self.clock.left
        cells = [
            Text(f"{duration(left)} left" if left is not None else "", style="bold"),
            Text(f"{duration(clock.elapsed)} so far", style="dim"),
        ]
        cells += (
            [Text(f"saved at {self.checkpoint}", style="dim")]
            if self.checkpoint is not None
            else []
        )
        cells = cells[: 3 if self.console.width >= 70 else 1]
        grid = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, *[None] * len(cells)):
            grid.add_column(ratio=ratio, no_wrap=True)
        bar = ProgressBar(
            total=clock.total_steps or 1,
            completed=clock.step if clock.total_steps else 0,
            complete_style="green",
        )
        grid.add_row(Text(clock.label(), style="bold"), bar, *cells)
        return grid

    def _metrics(self, width: int) -> Table:
        columns = 2 if width >= 84 else 1
        spark = max(8, min(40, width // columns - 24))
        grid = Table.grid(padding=(0, 2))
        cells = [
            (
                Text(LABELS[name], style="dim"),
                Text(f"{number(value):>8}", style="bold"),
                Text(f"{sparkline(self.trends[name].points, spark):<{spark}}", style="cyan"),
            )
            for name, value in self.latest.items()
        ]
        for row in range(0, len(cells), columns):
            grid.add_row(*(part for cell in cells[row : row + columns] for part in cell))
        return grid if cells else Table.grid()

    def _validation(self) -> Text:
        (first_step, first), (last_step, last) = self.validations[0], self.validations[-1]
        text = Text("validation", style="dim")
        text.append(
            (
                f"  step {last_step}"
                if last_step == first_step
                else f"  step {first_step} → {last_step}"
            ),
            style="dim",
        )
        for name, label in LABELS.items():
            if name in last:
                before = (
                    f"{number(first[name])} → " if name in first and last_step != first_step else ""
                )
                text.append(f"   {label} ", style="dim")
                text.append(f"{before}{number(last[name])}", style="bold green")
        return text

    def _samples(self, width: int) -> Table:
        grid = Table.grid(padding=(0, 2))
        for sample in self.samples:
            answer, _, value = answer_of(sample)
            verdict = (
                Text(number(value), style="bold green" if value > 0 else "bold red")
                if value is not None
                else Text()
            )
            prompt = Text(shorten(str(sample.get("prompt", "")), width // 3), style="dim")
            grid.add_row(verdict, prompt, Text(shorten(answer, width - width // 3 - 12)))
        return grid

"""What a terminal or notebook shows of a run."""

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemorl.data.statistics import LengthStatistics
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback
from nemorl.runtime.watch.metrics import LABELS, duration, headline, number, thin


def make_display(
    mode: Literal["auto", "live", "plain", "none"],
    *,
    total_steps: int | None = None,
    console: Console | None = None,
) -> Callback:
    """Return the display that `run.display` names."""
    console = console or Console()
    if mode == "none":
        return Callback()
    utf = console.encoding.lower().startswith("utf")
    capable = console.is_terminal and not console.is_dumb_terminal and utf
    if mode == "plain" or (mode == "auto" and not (capable or console.is_jupyter)):
        return PlainDisplay(total_steps, console)
    return (NotebookDisplay if console.is_jupyter else LiveDisplay)(total_steps, console)


def sparkline(values: list[float], width: int) -> str:
    """Draw values as blocks between their minimum and maximum.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    _, means = thin(([*range(len(values))], values), width)
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) * scale) if scale else 3] for mean in means)


def on_one_line(value: Any, width: int) -> Text:
    """Return a value on one line of `width`."""
    text = Text(" ".join(str(value).split()))
    text.truncate(width, overflow="ellipsis")
    return text


def answer_of(sample: dict[str, Any]) -> tuple[str, str, float | None]:
    """Return a sample's answer, and the name and value of its reward or margin.

    >>> answer_of({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5})
    ('2 rather than 3', 'margin', 0.5)
    >>> answer_of({"turns": [{"response": "5"}, {"response": "6"}], "failure": "KeyError: 'lost'"})
    ("5 · 6 (failed: KeyError: 'lost')", 'reward', None)
    """
    if "chosen" in sample:
        return f"{sample['chosen']} rather than {sample['rejected']}", "margin", sample["margin"]
    said = " · ".join(str(turn.get("response", "")) for turn in sample.get("turns", [sample]))
    said += f" (failed: {sample['failure']})" if "failure" in sample else ""
    return said, "reward", sample.get("reward")


class Display(Callback):
    def __init__(self, total_steps: int | None, console: Console) -> None:
        self.console, self.total_steps = console, total_steps
        self.progress = Progress(speed_estimate_period=3600.0, get_time=time.monotonic)
        self.progress.add_task("", total=total_steps)
        self.task = self.progress.tasks[0]
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(self, trainer: RunView) -> None:
        self.progress.reset(self.task.id, completed=trainer.state.step)

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self.progress.update(self.task.id, completed=step)

    def on_samples(self, trainer: RunView, step: int, samples: list[dict[str, Any]]) -> None:
        group = [sample for sample in samples if sample.get("group") == samples[0].get("group")]
        if "group" in samples[0] and len(group) > 1:  # the best and the worst
            group.sort(key=lambda sample: -(sample.get("reward") or 0))
            samples = group[:2] + group[2:][-2:]
        self.samples = samples[:4]

    @property
    def step(self) -> str:
        done, total = int(self.task.completed), self.total_steps
        return f"step {done}" if total is None else f"step {done:>{len(str(total))}}/{total}"

    @property
    def left(self) -> str:
        seconds = self.task.time_remaining
        return "" if seconds is None else f"{duration(seconds)} left"


class PlainDisplay(Display):
    """Print a line a step, at most one a second, fewer in long runs."""

    printed = -math.inf
    validated = False

    def on_train_begin(self, trainer: RunView) -> None:
        super().on_train_begin(trainer)
        if trainer.state.step:
            self._print(f"continuing after step {trainer.state.step}")

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, step, metrics)
        since, total = time.monotonic() - self.printed, self.total_steps or 0
        if step == total or (since >= 1 and (step % max(1, total // 1000) == 0 or since >= 30)):
            self._print(f"{self._line(metrics)}  {self.left}".rstrip())
            self.printed = time.monotonic()

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self.task.completed = step
        self._print(self._line(metrics, "validation"))
        self.validated = True

    def on_samples(self, trainer: RunView, step: int, samples: list[dict[str, Any]]) -> None:
        super().on_samples(trainer, step, samples)
        if not self.validated:
            return
        self.validated = False
        for sample in self.samples[:3]:
            answer, name, value = answer_of(sample)
            prompt = on_one_line(sample.get("prompt", ""), 50)
            verdict = f"  ({name} {number(value)})" if value is not None else ""
            self._print(f"    {prompt}  ->  {on_one_line(answer, 70)}{verdict}")

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        self.task.completed = trainer.state.step
        done = f"done in {duration(self.task.elapsed or 0)}"
        self._print(f"{self._line(metrics, done)}  {trainer.directory or ''}".rstrip())

    def _line(self, metrics: dict[str, float], *words: str) -> str:
        shown = {name: number(metrics[name]) for name in headline(metrics)}
        shown.pop("trainer/memory_gb", None)
        last = [name for name in ("tokens_per_second", "trainer/mfu") if name in shown]
        speed = [f"{shown.pop(name):>5} {LABELS[name]}" for name in last]
        values = [f"{LABELS[name]} {value:<8}" for name, value in shown.items()]
        return "  ".join([self.step, *words, *values, *speed]).rstrip()

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


class LiveDisplay(Display):
    """Draw a panel on rich's thread, so that values are replaced, not changed."""

    title = "nemorl"
    live: Live | None = None
    checkpoint: int | None = None

    def __init__(self, total_steps: int | None, console: Console) -> None:
        super().__init__(total_steps, console)
        self.courses: dict[str, deque[float]] = {name: deque(maxlen=4096) for name in LABELS}
        self.noted: dict[str, float] = {}  # shown in any step
        self.latest: dict[str, float] = {}
        self.validations: list[tuple[int, dict[str, float]]] = []  # the first and the last one

    def on_train_begin(self, trainer: RunView) -> None:
        super().on_train_begin(trainer)
        self.title = trainer.directory.resolve().name if trainer.directory else "nemorl"
        self.open()

    def open(self) -> None:
        self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)
        self.live.start()
        self.console.show_cursor(True)  # also after a kill

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, step, metrics)
        self.noted |= {name: metrics[name] for name in headline(metrics)}
        for name in metrics.keys() & LABELS:
            self.courses[name].append(metrics[name])
        self.latest = {name: metrics[name] for name in headline(self.noted) if name in metrics}

    def on_validation_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        self.validations = [*self.validations[:1], (step, metrics)]

    def on_checkpoint(self, trainer: RunView, step: int, path: Path) -> None:
        self.checkpoint = step

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        self.close()
        if trainer.directory:
            self.console.print(f"the run is in {trainer.directory}", highlight=False)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def render(self) -> Panel:
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
        cells = [Text(self.left, style="bold")]
        if self.console.width >= 70:
            cells += [Text(f"{duration(self.task.elapsed or 0)} so far", style="dim")]
            if self.checkpoint is not None:
                cells += [Text(f"saved at {self.checkpoint}", style="dim")]
        grid = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, *[None] * len(cells)):
            grid.add_column(ratio=ratio, no_wrap=True)
        done = self.task.completed if self.total_steps else 0
        bar = ProgressBar(total=self.total_steps or 1, completed=done, complete_style="green")
        grid.add_row(Text(self.step, style="bold"), bar, *cells)
        return grid

    def _metrics(self, width: int) -> Table:
        columns = 2 if width >= 84 else 1
        spark = max(8, min(40, width // columns - 24))
        grid = Table.grid(padding=(0, 2))
        cells = [
            (
                Text(LABELS[name], style="dim"),
                Text(f"{number(value):>8}", style="bold"),
                Text(f"{sparkline(list(self.courses[name]), spark):<{spark}}", style="cyan"),
            )
            for name, value in self.latest.items()
        ]
        for row in range(0, len(cells), columns):
            grid.add_row(*(part for cell in cells[row : row + columns] for part in cell))
        return grid

    def _validation(self) -> Text:
        (first_step, first), (last_step, last) = self.validations[0], self.validations[-1]
        several = last_step != first_step
        steps = f"{first_step} → {last_step}" if several else f"{last_step}"
        text = Text(f"validation  step {steps}", style="dim")
        for name in headline(last):
            before = f"{number(first[name])} → " if several and name in first else ""
            text.append(f"   {LABELS[name]} ", style="dim")
            text.append(f"{before}{number(last[name])}", style="bold green")
        return text

    def _samples(self, width: int) -> Table:
        grid, before = Table.grid(padding=(0, 2)), None
        for sample in self.samples:
            answer, _, value = answer_of(sample)
            color = "red" if value is not None and value <= 0 else "green"
            verdict = Text("" if value is None else number(value), style=f"bold {color}")
            asked = sample.get("prompt", "")
            prompt = on_one_line("" if asked == before else asked, width // 3)
            prompt.stylize("dim")
            before = asked
            grid.add_row(verdict, prompt, on_one_line(answer, width - width // 3 - 12))
        return grid


class NotebookDisplay(LiveDisplay):
    """Show the panel below a notebook's cell, redrawn in place without ipywidgets."""

    handle: Any = None
    drawn = -math.inf

    def open(self) -> None:
        from IPython.display import display  # in a notebook it is there

        self.handle = display(self.render(), display_id=True)

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, step, metrics)
        if time.monotonic() - self.drawn >= 1:
            self.handle.update(self.render())
            self.drawn = time.monotonic()

    def close(self) -> None:
        if self.handle is not None:
            self.handle.update(self.render())
            self.handle = None


def print_lengths(console: Console, statistics: Mapping[str, LengthStatistics]) -> None:
    """Print a line for each data set."""
    table = Table("data", title="lengths in tokens", title_justify="left")
    for name in ("sequences", "total", "mean", "median", "95 %", "max", "limit"):
        table.add_column(name, justify="right")
    for name, s in statistics.items():
        values = (s.count, s.total_tokens, f"{s.mean:.1f}", f"{s.median:g}", f"{s.p95:g}", s.max)
        table.add_row(name, *map(str, values), str(s.limit))
    console.print(table)
    for name, s in statistics.items():
        if s.num_over_limit:
            parts = {"cut to it": s.num_truncated, "left out": s.num_dropped}
            taken = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
            line = f"{name}: {s.num_over_limit} over the limit of {s.limit} tokens"
            console.print(f"{line} ({taken})" if taken else line, style="yellow")

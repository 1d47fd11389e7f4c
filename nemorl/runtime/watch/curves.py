"""The picture of a metric, for the report and in plots/. Free of torch."""

import io
import math
import re
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nemorl.checks import warn
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.files import NotWritten, writing
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback
from nemorl.runtime.watch.metrics import (
    LABELS,
    METRICS,
    Course,
    course_of,
    headline,
    is_usual,
    number,
    placed,
    smooth,
)

TRAIN, VALIDATION, GRID, TEXT, PAPER = "#2563eb", "#ea580c", "#e5e7eb", "#374151", "#fffffe"
RUNS = (TRAIN, VALIDATION, "#15803d", "#9333ea", "#0891b2", "#be185d")
"""Colors of several runs on one page."""
VARIABLES = ("train", "val", "run2", "run3", "run4", "run5")
COLORS = {GRID: "line", TEXT: "dim", PAPER: "card", **dict(zip(RUNS, VARIABLES, strict=True))}
"""Color → the variable of report.css for it."""
BOX = (0.12, 0.11, 0.975, 0.96)
"""Left, bottom, right and top of the axes in the report, as in report.js."""
UNUSED = r"<metadata>.*?</metadata>|<style .*?</style>| id=\"[\w.]+_\d+\"| font-family: [^;]*;"
"""What a picture on a page does not need, or would change the page."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "text.parse_math": False,  # a run may have a name with dollar signs
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "svg.fonttype": "none",
}


def svg(name: str, *courses: Course) -> tuple[str, tuple[float, float]]:
    """Return a metric's picture in the page's colors, and its first and last step."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 2.0))
        axes = figure.add_axes((BOX[0], BOX[1], BOX[2] - BOX[0], BOX[3] - BOX[1]))
        panel(axes, name, *courses)
        axes.tick_params(labelsize=8)
        axes.spines[:].set_visible(False)
        axes.grid(False, axis="x")
        figure.savefig(file := io.StringIO(), format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(UNUSED, "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in COLORS.items():
        text = text.replace(color, f"var(--{variable})")
    return text, axes.get_xlim()


def panel(axes: Axes, name: str, *courses: Course) -> None:
    """Draw a metric's course: values, smoothed, and markers for validations."""
    alone = len(courses) == 1
    for (train, validation), color in zip(courses, RUNS, strict=False):
        steps, values = train
        if len(steps) >= 20:
            axes.plot(steps, values, color=color, linewidth=1, alpha=0.25)
            values = smooth(values, width=len(steps) / 50)
            axes.plot(steps, values, color=color, linewidth=2, label="training, smoothed")
        elif steps:
            axes.plot(steps, values, color=color, linewidth=2, marker="o", ms=4, label="training")
        if validation[0]:
            axes.plot(
                *validation,
                color=VALIDATION if alone else color,
                linewidth=1,
                linestyle=":",
                marker="o",
                markersize=5,
                markeredgecolor=PAPER,
                zorder=3,
                label="validation",
            )
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.margins(x=0.02, y=0.08)
    greatest = max(abs(value) for course in courses for _, values in course for value in values)
    if placed(name)[0] == "Speed and resources":
        axes.set_ylim(bottom=0, top=1.1 * greatest or 1.0)
    axes.ticklabel_format(axis="y", useOffset=False)
    if not 1e-3 <= greatest < 1e4:
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
    if name.startswith("token_mult_prob_error"):  # rounding errors look flat
        top = max(1.01, greatest)
        axes.set_ylim(1 - 0.05 * (top - 1), 1 + 1.1 * (top - 1))
    if name == "accuracy":
        axes.set_ylim(-0.03, 1.03)


class PlotCallback(Callback):
    """Draw plots/*.png at the end; a failure is a warning."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: RunView, metrics: dict[str, float]) -> None:
        try:
            draw(self.directory)
        except Exception as error:
            why = error if isinstance(error, NotWritten) else repr(error)
            warn(f"the plots of {self.directory.path} could not be drawn: {why}")


def draw(directory: RunDirectory) -> list[Path]:
    """Draw plots/NAME.png of each metric, and plots/overview.png."""
    records = directory.read_metrics()
    courses = {name: course_of(records, name) for name in LABELS}
    present = {n: c for n, c in courses.items() if not is_usual(n, c[0][1] + c[1][1])}
    if not present:
        return []
    with writing("the plots", directory.plots):
        directory.plots.mkdir(exist_ok=True)
    pictures = {name.replace("/", "_"): {name: course} for name, course in present.items()}
    pictures["overview"] = {name: present[name] for name in headline(*records) if name in present}
    return [
        _save(panels, directory.name, directory.plots / f"{file}.png")
        for file, panels in pictures.items()
    ]


def _save(panels: dict[str, Course], run: str, file: Path) -> Path:
    both = [name for name, (train, validation) in panels.items() if train[0] and validation[0]]
    explained = [*both, *panels][0]  # one legend is enough
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows, alone = math.ceil(len(panels) / columns), len(panels) == 1
    size = (7.0, 4.2) if alone else (4.6 * columns, 3.2 * rows + 0.5)
    with rc_context(STYLE):
        # Without pyplot, which may open a window.
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        if not alone:
            figure.suptitle(run, fontsize=13, fontweight="bold")
        for index, (name, course) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, index)
            panel(axes, name, course)
            if name == explained:
                axes.legend(frameon=False, fontsize=8, loc="best")
            title = METRICS[name].title + (f" · {run}" if alone else "")
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel("step")
            meaning = METRICS[name].meaning.partition(";")[0].partition(",")[0]
            axes.set_ylabel(fill(meaning, 34))  # characters along an axis of the overview
        with writing("a plot", file):
            figure.savefig(file)
    return file

"""Pictures of a run, drawn from its metrics.jsonl: for plots/ and for the report."""

import io
import math
import re
import warnings
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.state import Run
from nemorl.runtime.watch.metrics import LABELS, METRICS, Series, placed, series_of, smooth

TRAIN, VALIDATION, GRID, TEXT, PAPER = "#2563eb", "#ea580c", "#e5e7eb", "#374151", "#fffffe"
COLORS = {TRAIN: "train", VALIDATION: "val", GRID: "line", TEXT: "dim", PAPER: "card"}
"""Color → the variable of report.css that has its place on the page."""
BOX = (0.12, 0.11, 0.975, 0.96)
"""Left, bottom, right and top of the axes in the report; report.js knows them, too."""
UNUSED = r"<metadata>.*?</metadata>|<style .*?</style>| id=\"[\w.]+_\d+\"| font-family: [^;]*;"
"""What a picture on a page does not need, or what would hold for the whole page."""
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


class PlotCallback(Callback):
    """Draw plots/*.png at the end of the run; a failure is a warning."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        try:
            draw(self.directory)
        except Exception as error:
            message = f"the plots of {self.directory.path} could not be drawn: {error!r}"
            warnings.warn(message, stacklevel=2)


def draw(directory: RunDirectory) -> list[Path]:
    """Draw plots/NAME.png for each metric of the live table, and plots/overview.png with all."""
    records, present = directory.read_metrics(), {}
    for name in LABELS:
        pair = series_of(records, name, "train"), series_of(records, name, "validation")
        if pair[0][0] or pair[1][0]:
            present[name] = pair
    if not present:
        return []
    directory.plots.mkdir(exist_ok=True)
    pictures = {name.replace("/", "_"): {name: pair} for name, pair in present.items()}
    pictures["overview"] = present
    return [
        _save(panels, directory.name, directory.plots / f"{file}.png")
        for file, panels in pictures.items()
    ]


def _save(panels: dict[str, tuple[Series, Series]], run: str, file: Path) -> Path:
    both = [name for name, (train, validation) in panels.items() if train[0] and validation[0]]
    explained = [*both, *panels][0]  # one legend is enough
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows, alone = math.ceil(len(panels) / columns), len(panels) == 1
    size = (7.0, 4.2) if alone else (4.6 * columns, 3.2 * rows + 0.5)
    with rc_context(STYLE):
        # No pyplot: no window is opened, and the caller's own settings stay as they are.
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        if not alone:
            figure.suptitle(run, fontsize=13, fontweight="bold")
        for index, (name, (train, validation)) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, index)
            panel(axes, name, train, validation)
            if name == explained:
                axes.legend(frameon=False, fontsize=8, loc="best")
            title = METRICS[name].title + (f" · {run}" if alone else "")
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel("step")
            axes.set_ylabel(METRICS[name].meaning.partition(";")[0].partition(",")[0])
        figure.savefig(file)
    return file


def svg(name: str, train: Series, validation: Series) -> tuple[str, tuple[float, float]]:
    """Return a picture of one metric for the report, and the steps at its left and right edge."""
    with rc_context(STYLE):
        figure, file = Figure(figsize=(4.2, 2.0)), io.StringIO()
        axes = figure.add_axes((BOX[0], BOX[1], BOX[2] - BOX[0], BOX[3] - BOX[1]))
        panel(axes, name, train, validation)
        axes.tick_params(labelsize=8)
        axes.spines[:].set_visible(False)
        axes.grid(False, axis="x")
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(UNUSED, "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in COLORS.items():
        text = text.replace(color, f"var(--{variable})")
    return text, axes.get_xlim()


def panel(axes: Axes, name: str, train: Series, validation: Series) -> None:
    """Draw a metric's course: a smoothed line over faint values, and markers for validations."""
    steps, values = train
    if len(steps) >= 20:
        axes.plot(steps, values, color=TRAIN, linewidth=1, alpha=0.25)
        values = smooth(values, width=len(steps) / 50)
        axes.plot(steps, values, color=TRAIN, linewidth=2, label="training, smoothed")
    elif steps:
        axes.plot(steps, values, color=TRAIN, linewidth=2, marker="o", ms=4, label="training")
    if validation[0]:
        style: Any = {"linewidth": 1, "linestyle": ":", "marker": "o", "markersize": 5}
        style |= {"color": VALIDATION, "markeredgecolor": PAPER, "zorder": 3}
        axes.plot(*validation, **style, label="validation")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.margins(x=0.02, y=0.08)
    greatest = max(map(abs, (*train[1], *validation[1])))
    if placed(name)[0] == "Speed and resources":
        axes.set_ylim(bottom=0, top=1.1 * greatest or 1.0)
    axes.ticklabel_format(axis="y", useOffset=False)
    if greatest >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif greatest < 1e-3:
        axes.yaxis.set_major_formatter("{x:.2g}")
    if name.startswith("token_mult_prob_error"):  # rounding errors must not look like mountains
        top = max(1.01, greatest)
        axes.set_ylim(1 - 0.05 * (top - 1), 1 + 1.1 * (top - 1))
    if name == "accuracy":
        axes.set_ylim(-0.03, 1.03)

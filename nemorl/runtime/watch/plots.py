"""Pictures of a run, drawn from its metrics.jsonl."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.watch.series import Series, series_of, smooth

TRAIN, VALIDATION, GRID, TEXT = "#2563eb", "#ea580c", "#e5e7eb", "#374151"


class Plot(NamedTuple):
    """One picture: the metric that it shows, its title, and what its vertical axis says."""

    metric: str
    title: str
    axis: str


PLOTS = {
    "reward": Plot("reward", "Reward", "mean reward"),
    "accuracy": Plot("accuracy", "Accuracy", "share that is right"),
    "margin": Plot("margin", "Reward margin", "chosen minus rejected"),
    "length": Plot("response_length", "Response length", "tokens"),
    "kl": Plot("kl", "KL to the reference model", "nats per token"),
    "entropy": Plot("entropy", "Entropy", "nats per token"),
    "loss": Plot("loss", "Loss", "loss"),
    "gap": Plot(
        "token_mult_prob_error", "Sampler against trainer", "mean factor between probabilities"
    ),
    "throughput": Plot("tokens_per_second", "Throughput", "tokens per second"),
    "mfu": Plot("trainer/mfu", "Model FLOPs utilisation", "share of the device's peak"),
    "memory": Plot("trainer/memory_gb", "Memory of the trainer", "GB, peak of a device"),
}
"""File name → picture."""

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "text.parse_math": False,  # a run may have a name with dollar signs
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def draw(directory: RunDirectory | Path | str) -> list[Path]:
    """Draw plots/<name>.png for each metric of `PLOTS` that the run has, and plots/overview.png
    with all of them.

    Training is a smoothed line over the faint values of the single steps, validation is markers.
    Returns the files, [] where the run has no such metric yet. Raises ValueError where there is no
    run.
    """
    directory = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
    records = directory.read_metrics()
    series = {
        name: (
            series_of(records, plot.metric, "train"),
            series_of(records, plot.metric, "validation"),
        )
        for name, plot in PLOTS.items()
    }
    present = {name: pair for name, pair in series.items() if pair[0][0] or pair[1][0]}
    if not present:
        return []
    directory.plots.mkdir(exist_ok=True)
    files = [
        _save({name: pair}, directory.plots / f"{name}.png", directory.name, columns=1)
        for name, pair in present.items()
    ]
    return [
        *files,
        _save(
            present,
            directory.plots / "overview.png",
            directory.name,
            columns=_columns(len(present)),
        ),
    ]


def _columns(count: int) -> int:
    return min(count, 3) if count != 4 else 2


def _save(
    panels: dict[str, tuple[Series, Series]], path: Path, run_name: str, *, columns: int
) -> Path:
    """One figure with a grid of panels."""
    explained = next(
        (name for name, (train, validation) in panels.items() if train[0] and validation[0]),
        next(iter(panels)),
    )  # one legend is enough
    rows = math.ceil(len(panels) / columns)
    size = (7.0, 4.2) if len(panels) == 1 else (4.6 * columns, 3.2 * rows + 0.5)
    with rc_context(STYLE):
        figure = Figure(
            figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        )
        FigureCanvasAgg(figure)  # no window, and the caller's own pyplot settings stay as they are
        if len(panels) > 1:
            figure.suptitle(run_name, fontsize=13, fontweight="bold")
        for index, (name, (train, validation)) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, index)
            _panel(axes, PLOTS[name], train, validation)
            if name == explained:
                axes.legend(frameon=False, fontsize=8, loc="best")
            axes.set_title(
                PLOTS[name].title + (f" · {run_name}" if len(panels) == 1 else ""),
                loc="left",
                fontsize=11,
                fontweight="bold",
            )
        figure.savefig(path)
    return path


def _panel(axes: Axes, plot: Plot, train: Series, validation: Series) -> None:
    steps, values = train
    if len(steps) >= 20:
        axes.plot(steps, values, color=TRAIN, linewidth=1, alpha=0.25)
        axes.plot(
            steps,
            smooth(values, width=len(steps) / 50),
            color=TRAIN,
            linewidth=2,
            label="training, smoothed",
        )
    elif steps:
        axes.plot(
            steps, values, color=TRAIN, linewidth=2, marker="o", markersize=4, label="training"
        )
    if validation[0]:
        axes.plot(
            *validation,
            color=VALIDATION,
            linewidth=1,
            linestyle=":",
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="validation",
            zorder=3,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(plot.axis)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.margins(x=0.02, y=0.08)
    if plot.metric in ("tokens_per_second", "trainer/mfu", "trainer/memory_gb"):
        axes.set_ylim(bottom=0, top=1.1 * max((*values, *validation[1])) or 1.0)
    if plot.metric == "tokens_per_second":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if plot.metric == "token_mult_prob_error":  # rounding errors must not look like mountains
        top = max(1.01, *values, *validation[1])
        axes.set_ylim(1 - 0.05 * (top - 1), 1 + 1.1 * (top - 1))
    if plot.metric == "accuracy":
        axes.set_ylim(-0.03, 1.03)

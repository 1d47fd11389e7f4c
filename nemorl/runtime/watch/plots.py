"""Pictures of a run in plots/, drawn from its metrics.jsonl."""

import math
from pathlib import Path
from textwrap import fill

from matplotlib import rc_context
from matplotlib.figure import Figure

from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.files import NotWritten, writing
from nemorl.runtime.store.state import Run
from nemorl.runtime.watch.curves import STYLE, panel
from nemorl.runtime.watch.metrics import LABELS, METRICS, Series, headline, is_usual, series_of
from nemorl.warn import warn

LABEL_WIDTH = 34
"""Characters that lie along an axis of the overview."""


class PlotCallback(Callback):
    """Draw plots/*.png at the end of the run; a failure is a warning."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        try:
            draw(self.directory)
        except Exception as error:
            why = str(error) if isinstance(error, NotWritten) else repr(error)
            message = f"the plots of {self.directory.path} could not be drawn: {why}"
            warn(message)


def draw(directory: RunDirectory) -> list[Path]:
    """Draw plots/NAME.png of each metric, and plots/overview.png."""
    records, present = directory.read_metrics(), {}
    for name in LABELS:
        pair = series_of(records, name, "train"), series_of(records, name, "validation")
        if not is_usual(name, pair[0][1] + pair[1][1]):
            present[name] = pair
    if not present:
        return []
    with writing("the plots", directory.plots):
        directory.plots.mkdir(exist_ok=True)
    pictures = {name.replace("/", "_"): {name: pair} for name, pair in present.items()}
    pictures["overview"] = {name: present[name] for name in headline(*records) if name in present}
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
            panel(axes, name, (train, validation))
            if name == explained:
                axes.legend(frameon=False, fontsize=8, loc="best")
            title = METRICS[name].title + (f" · {run}" if alone else "")
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel("step")
            meaning = METRICS[name].meaning.partition(";")[0].partition(",")[0]
            axes.set_ylabel(fill(meaning, LABEL_WIDTH))
        with writing("a plot", file):
            figure.savefig(file)
    return file

"""The gap between sampler and trainer by place in the response, as the report draws it."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemorl.checks import is_number
from nemorl.runtime.store.verify import DEPTH
from nemorl.runtime.watch.curves import BOX, GRID, STYLE, TRAIN, VALIDATION, svg_of
from nemorl.runtime.watch.metrics import number


def depths(metrics: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    """Return the gaps of all steps by the token of the response from which on they were measured.

    >>> depths([{"receipts/kl_from_4": 0.5, "loss": 1.0}, {"receipts/kl_from_1": 0.0}])
    {1: [0.0], 4: [0.5]}
    """
    found: dict[int, list[float]] = {}
    for line in metrics:
        for name, value in line.items():
            first = name.removeprefix(DEPTH)
            if first != name and first.isdigit() and is_number(value):
                found.setdefault(int(first), []).append(value)
    return {first: found[first] for first in sorted(found)}


def depth_profile(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return a picture of the mean gap over the steps at each depth, and of the largest one; "" of
    a run without the measurements.
    """
    if not (found := depths(metrics)):
        return ""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 2.0))
        axes = figure.add_axes((BOX[0], BOX[1], BOX[2] - BOX[0], BOX[3] - BOX[1]))
        _draw(axes, found)
        return svg_of(figure)


def _draw(axes: Axes, found: Mapping[int, Sequence[float]]) -> None:
    places = range(len(found))
    means = [sum(values) / len(values) for values in found.values()]
    style: Any = {"linewidth": 2, "marker": "o", "markersize": 4}
    axes.plot(places, [max(values) for values in found.values()], color=VALIDATION, **style)
    axes.plot(places, means, color=TRAIN, **style)
    axes.set_xticks(list(places), [number(first) for first in found])
    axes.tick_params(length=0, labelsize=8)
    axes.grid(color=GRID, linewidth=0.8, axis="y")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.margins(x=0.05, y=0.08)

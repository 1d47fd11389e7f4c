"""The page of `nemorl report`: one HTML file that needs nothing but itself."""

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from nemorl.runtime.config.tree import flat
from nemorl.runtime.config.yaml_io import dump
from nemorl.runtime.run.directory import RunDirectory, to_json
from nemorl.runtime.run.files import write_atomically
from nemorl.runtime.watch.metrics import (
    LABELS,
    duration,
    is_number,
    number,
    placed,
    series_of,
    thin,
)
from nemorl.runtime.watch.plots import svg
from nemorl.runtime.watch.report.gather import Gathered
from nemorl.runtime.watch.report.samples import modes, sample_data

HERE = Path(__file__).parent
MOST_POINTS = 1000
MOST_TILES = 6
ENGINES = {
    "tokens": "generated in a step",
    "tokens_per_second": "while generating",
    "busy": "share of the time of generating in which it computed",
    "restarts": "in a step",
}
STATISTICS = {
    "count": ("sequences", "{:,}"),
    "total_tokens": ("tokens", "{:,}"),
    "mean": ("mean length", "{:,.1f}"),
    "median": ("median", "{:,.0f}"),
    "p95": ("95 of 100 up to", "{:,.0f}"),
    "max": ("longest", "{:,}"),
    "limit": ("limit", "{:,}"),
    "num_truncated": ("cut", "{:,}"),
    "num_dropped": ("omitted", "{:,}"),
    "padded_fill": ("tokens in a padded batch", "{:.0%}"),
    "packed_fill": ("tokens in packed rows", "{:.0%}"),
}
"""Keys of data.json, with their names on the page and their formats."""


def write_report(run: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of a run, also of one in progress or one that crashed.

    output: `report.html` in the run's directory unless given.
    Returns: the file.
    Raises: ValueError where there is no run, or the file can't be written.
    """
    directory = RunDirectory.open(run)
    target = Path(output) if output is not None else directory.path / "report.html"
    page = render(Gathered(run))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page)
    except OSError as error:
        raise ValueError(
            f"output must be a file that can be written, but {target} can't ({error}): name another"
            " one (--output)"
        ) from error
    return target


def render(run: Gathered) -> str:
    """Return the page, in which text of the run is escaped and no script but ours runs."""
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page.filters |= {"number": number, "duration": duration, "moment": _moment, "setting": _setting}
    style, script = (
        Markup(HERE.joinpath(name).read_text("utf-8")) for name in ("report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    curves = curves_of(run)
    data = to_json({"curves": [curve["data"] for curve in curves], "samples": sample_data(run)})
    return page.get_template("page.html").render(
        run=run,
        record=run.record,
        style=style,
        script=script,
        digest=digest,
        data=data,
        tiles=[curve for curve in curves if curve["metric"] in LABELS][:MOST_TILES],
        groups=grouped(curves),
        modes=modes(run),
        statistics=statistics(run),
        settings=settings(run.config),
        yaml=dump(run.config),
        log=merged_log(run.log),
    )


def curves_of(run: Gathered) -> list[dict[str, Any]]:
    """Return every metric that was ever a number, in the order of `SECTIONS`."""
    names = {name for line in run.metrics for name, value in line.items() if is_number(value)}
    curves: list[dict[str, Any]] = []
    for name in sorted(names - {"step", "time"}, key=lambda name: (placed(name)[1], name)):
        train, validation = (
            thin(series_of(run.metrics, name, phase), MOST_POINTS)
            for phase in ("train", "validation")
        )
        section, _, metric = placed(name)
        values = validation[1] or train[1]
        curve: dict[str, Any] = {
            "metric": name,
            "section": section,
            "title": metric.title,
            "meaning": metric.meaning or ENGINES.get(name.rpartition("/")[2], ""),
            "phase": "validation" if validation[0] else "training",
            "first": values[0],
            "last": values[-1],
            "now": (train[1] or validation[1])[-1],
            "several": len(values) > 1,
            "total": sum(train[1]),
            "constant": not validation[0] and len(train[0]) > 2 and len(set(train[1])) == 1,
            "place": len(curves),
            "data": {},
        }
        if not curve["constant"]:
            picture, edges = svg(name, train, validation)
            curve["svg"] = Markup(picture)
            curve["data"] = {"edges": edges, "train": train, "validation": validation}
        curves.append(curve)
    return curves


def grouped(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sections with their curves, and with those that never changed."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        sections.setdefault(curve["section"], []).append(curve)
    return [
        {
            "name": section,
            "drawn": [curve for curve in members if not curve["constant"]],
            "constant": [curve for curve in members if curve["constant"]],
            "shares": time_shares(members),
        }
        for section, members in sections.items()
    ]


def time_shares(curves: list[dict[str, Any]]) -> dict[str, float]:
    """Return the phases' shares of the steps' time, and the rest."""
    totals = {
        curve["metric"]: curve["total"] for curve in curves if curve["metric"].startswith("seconds")
    }
    whole = totals.pop("seconds", 0.0)
    if not totals or whole <= 0:
        return {}
    shares = {
        name.removeprefix("seconds_").replace("_", " "): total / whole
        for name, total in totals.items()
    }
    rest = 1 - sum(shares.values())
    return shares | ({"other": rest} if rest > 0.005 else {})


def statistics(run: Gathered) -> dict[str, dict[str, Any]]:
    """Return each data set's token counts in words, and the bars of their histogram."""
    found = {}
    for name, numbers in run.data.items():
        rows = {
            label: form.format(numbers[key])
            for key, (label, form) in STATISTICS.items()
            if key in numbers
        }
        bars = numbers.get("histogram") or ()
        most = max((count for _, count in bars), default=1)
        found[name] = {"rows": rows, "bars": bars, "most": most}
    return found


def settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings by section: dotted name → value."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = flat(value, f"{key}.")
        else:
            found[""][key] = value
    return {name: values for name, values in found.items() if values}


def merged_log(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the log, each message once, with its count."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for line in log:
        key = str(line.get("level")), str(line.get("message"))
        merged.setdefault(key, {**line, "times": 0})["times"] += 1
    return list(merged.values())


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _setting(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    return "none" if value is None else json.dumps(to_json(value), ensure_ascii=False)

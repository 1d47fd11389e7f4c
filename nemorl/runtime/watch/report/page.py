"""The page of `nemorl report`: one HTML file that needs nothing but itself, with everything about a
run that a person wants to look at.
"""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemorl.runtime.config.tree import flat
from nemorl.runtime.config.yaml_io import dump
from nemorl.runtime.run.directory import RunDirectory, to_json, write_atomically
from nemorl.runtime.watch.display import duration, number
from nemorl.runtime.watch.report.curves import Curve, curve_data, curve_sections, curves_of
from nemorl.runtime.watch.report.elements import Html, element, join
from nemorl.runtime.watch.report.gather import Gathered, gather
from nemorl.runtime.watch.report.samples import sample_data, sample_section
from nemorl.runtime.watch.series import is_number

TILES = (
    "accuracy",
    "reward",
    "margin",
    "loss",
    "kl",
    "entropy",
    "response_length",
    "tokens_per_second",
)
"""The metrics of the page's head, where a run has them; validation before training."""
MOST_TILES = 6
STATISTICS = {
    "count": ("sequences", "{:,}"),
    "total_tokens": ("tokens", "{:,}"),
    "mean": ("mean length", "{:,.1f}"),
    "median": ("median", "{:,.0f}"),
    "p95": ("95 of 100 up to", "{:,.0f}"),
    "max": ("longest", "{:,}"),
    "limit": ("limit", "{:,}"),
    "num_truncated": ("cut", "{:,}"),
    "num_dropped": ("left out", "{:,}"),
    "padded_fill": ("tokens in a padded batch", "{:.0%}"),
    "packed_fill": ("tokens in packed rows", "{:.0%}"),
}
"""The numbers of data.json that are shown: what they are called, and how they are written."""
STATUS = {
    "running": "running",
    "finished": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
    "unknown": "no record of its end",
}


def write_report(run: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of a run, `report.html` in its directory unless `output` is given; returns
    the file.

    Works for a run in progress and for one that crashed. Raises ValueError where there is no run,
    or the file can't be written.
    """
    directory = RunDirectory.open(run)
    target = Path(output) if output is not None else directory.path / "report.html"
    text = (
        render(gather(run)).encode("utf-8", "replace").decode("utf-8")
    )  # a sample may hold half a surrogate pair
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise ValueError(
            f"output must be a file that can be written, but {target} can't ({error}): name another"
            " one (--output)"
        ) from error
    return target


def render(run: Gathered) -> str:
    """The page as text."""
    curves = curves_of(run.metrics)
    style, script = (
        files("nemorl.runtime.watch.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    data = json.dumps(
        to_json({"curves": curve_data(curves), "samples": sample_data(run)}), separators=(",", ":")
    )
    sections = {
        "Curves": _curves(curves),
        "Samples": sample_section(run),
        "Data": _data(run.data),
        "Settings": _settings(run),
        "Log": _log(run),
        "Environment": _environment(run),
    }
    present = {title: body for title, body in sections.items() if body}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is fetched, and no script runs but the one below: not even if text of a run ever
        # got past the escaping.
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"default-src 'none'; style-src 'unsafe-inline'; script-src {_digest(script)}",
        ),
        element("title", f"{run.name} · nemorl"),
        element("style", Html(style)),
    )
    body = element(
        "body",
        _head(run, list(present)),
        element(
            "main",
            _banner(run),
            _tiles(curves),
            *(
                element("section", element("h2", title), body, id=title.lower())
                for title, body in present.items()
            ),
        ),
        element("footer", f"Made by nemorl {_version()} on {_moment(run.now)} with nemorl report."),
        element(
            "script", Html(data.replace("<", "\\u003c")), type="application/json", id="report-data"
        ),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _version() -> str:
    try:
        return version("nemorl")
    except PackageNotFoundError:
        return "(not installed)"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _head(run: Gathered, titles: Sequence[str]) -> Html:
    record, model = run.record, run.config.get("model")
    steps = f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    facts = {
        "algorithm": record.algorithm if record else None,
        "model": str(model["path"]) if isinstance(model, dict) and model.get("path") else None,
        "steps": steps,
        "time": (
            duration(run.seconds)
            + (
                f", in {len(record.sessions)} sessions"
                if record and len(record.sessions) > 1
                else ""
            )
        ),
        "begun": _moment(record.sessions[0]) if record and record.sessions else None,
        "run id": record.run_id if record else None,
    }
    told = [
        element("span", element("i", f"{name} "), value, class_="fact")
        for name, value in facts.items()
        if value
    ]
    share = min(1.0, run.step / run.total_steps) if run.total_steps else None
    bar = (
        element("div", element("div", style=f"width:{share:.2%}"), class_=f"progress {run.status}")
        if share is not None
        else None
    )
    links = [element("a", title, href=f"#{title.lower()}") for title in titles]
    themes = element(
        "button", "◐", id="theme", type="button", title="light or dark", aria_label="light or dark"
    )
    return element(
        "header",
        element(
            "div",
            element("h1", run.name),
            element("span", STATUS[run.status], class_=f"status {run.status}"),
            class_="name",
        ),
        element("div", *told, class_="facts"),
        bar,
        element("nav", *links, themes),
    )


def _banner(run: Gathered) -> Html | None:
    where = f"at step {run.step:,}"
    if run.status == "running":
        told = (
            f"A snapshot of a run in progress, taken {where} on {_moment(run.now)}. Make the report"
            " anew to see more."
        )
        return element("p", told, class_="banner")
    if run.status == "failed" and run.record:
        return element(
            "p",
            element("b", f"The run failed {where}. "),
            run.record.error or "",
            class_="banner bad",
        )
    if run.status == "interrupted":
        advice = "Go on from the last checkpoint with --run.resume."
        return element(
            "p", element("b", f"The run was interrupted {where}. "), advice, class_="banner warn"
        )
    return None


def _tiles(curves: Sequence[Curve]) -> Html | None:
    """The run in a few numbers: where each stands, and where it began."""
    by_name = {curve.metric: curve for curve in curves}
    tiles: list[Html] = []
    for metric in TILES:
        if metric not in by_name:
            continue
        curve = by_name[metric]
        for phase, (_, values) in (("validation", curve.validation), ("training", curve.train)):
            if values and not (
                phase == "training"
                and curve.validation[0]
                and metric in ("accuracy", "loss", "margin")
            ):
                change = f", from {number(values[0])}" if len(values) > 1 else ", measured once"
                parts = (
                    element("span", curve.title),
                    element("b", number(values[-1])),
                    element("small", element("i", phase), change),
                )
                tiles.append(element("div", *parts, class_=f"tile {phase}", title=curve.meaning))
                break
    return element("div", *tiles[:MOST_TILES], class_="tiles") if tiles else None


def _curves(curves: Sequence[Curve]) -> Html:
    if not curves:
        return element("p", "No step has been finished yet.", class_="empty")
    key = [
        element("span", name, class_=f"key {class_}")
        for name, class_ in (("training", "train"), ("validation", "val"))
    ]
    controls = element(
        "div",
        element(
            "label",
            "Find ",
            element("input", type="search", id="find-curve", placeholder="name of a metric"),
            class_="js",
        ),
        element(
            "label",
            "Smoothing ",
            element("input", type="range", id="smoothing", min=0, max=100, value=50),
            class_="js",
        ),
        element("span", *key, class_="keys"),
        class_="controls",
    )
    return join(controls, curve_sections(curves))


def _data(statistics: Mapping[str, Mapping[str, Any]]) -> Html | None:
    """Token counts of the data sets."""
    if not statistics:
        return None
    cards = []
    for name, numbers in statistics.items():
        rows = [
            element("tr", element("th", label), element("td", form.format(numbers[key])))
            for key, (label, form) in STATISTICS.items()
            if is_number(numbers.get(key))
        ]
        table = element("table", *rows, class_="plain")
        cards.append(
            element(
                "div",
                element("h3", name),
                _histogram(numbers.get("histogram")),
                table,
                class_="card",
            )
        )
    return element("div", *cards, class_="cards")


def _histogram(classes: Any) -> Html | None:
    """How many sequences there are of each class of lengths, as bars; `classes` are pairs of
    greatest length and number.
    """
    pairs = (
        [
            pair
            for pair in classes
            if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        ]
        if isinstance(classes, list)
        else []
    )
    if not pairs:
        return None
    most = max(count for _, count in pairs) or 1
    bars = []
    for longest, count in pairs:
        bar, told = (
            element("i", style=f"height:{0.8 * count / most:.1%}"),
            f"{count:,} of up to {longest:,} tokens",
        )
        bars.append(element("span", bar, element("small", str(longest)), title=told))
    return element("div", *bars, class_="histogram")


def _settings(run: Gathered) -> Html | None:
    """The configuration by sections; what differs from the defaults stands out."""
    if not run.config:
        return None
    plain = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {"": plain} | {
        key: value for key, value in run.config.items() if isinstance(value, dict)
    }
    cards = []
    for name, values in sections.items():
        rows = [
            _setting(f"{name}.{key}" if name else key, key, value, run.changed)
            for key, value in flat(values).items()
        ]
        if rows:
            count = sum("changed" in row.split(">", 1)[0] for row in rows)
            title = element(
                "summary",
                element("h3", name or "the algorithm"),
                element("small", f"{count} changed" if count else ""),
            )
            cards.append(
                element(
                    "details",
                    title,
                    element("table", *rows, class_="settings"),
                    class_="card",
                    open=True,
                )
            )
    controls = element(
        "div",
        element(
            "label",
            "Find ",
            element("input", type="search", id="find-setting", placeholder="name or value"),
            class_="js",
        ),
        (
            element(
                "label",
                element("input", type="checkbox", id="only-changed"),
                " only what differs from the defaults",
                class_="js",
            )
            if run.changed
            else None
        ),
        class_="controls",
    )
    as_yaml = dump(run.config)
    return join(
        controls,
        element("div", *cards, class_="columns"),
        element("details", element("summary", "as YAML"), element("pre", as_yaml)),
    )


def _setting(dotted: str, key: str, value: Any, changed: Mapping[str, Any]) -> Html:
    differs = dotted in changed
    was = (
        element("small", f"default {_value(changed[dotted])}")
        if differs and changed[dotted] is not None
        else None
    )
    row = (element("th", breakable(key, "_")), element("td", breakable(_value(value), "/"), was))
    return element(
        "tr", *row, class_="changed" if differs else None, title=f"--{dotted.replace('_', '-')}"
    )


def breakable(text: str, after: str) -> Html:
    """A text that may go on in the next line after a sign.

    >>> breakable("max_num_steps", "_")
    'max_<wbr>num_<wbr>steps'
    """
    *parts, last = text.split(after)
    return join(*(piece for part in parts for piece in (part + after, element("wbr"))), last)


def _value(value: Any) -> str:
    return (
        value
        if isinstance(value, str) and value
        else "none"
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )


def _log(run: Gathered) -> Html | None:
    """Warnings and errors; everything else on demand.

    The same line again and again is shown once, with its count.
    """
    if not run.log:
        return None
    merged: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in run.log:
        merged.setdefault((str(line.get("level")), str(line.get("message"))), []).append(line)
    rows = []
    for (level, message), lines in merged.items():
        first, times = lines[0], f" ×{len(lines)}" if len(lines) > 1 else ""
        place = str(first.get("traceback") or first.get("place") or "")
        more = (
            element("details", element("summary", "where"), element("pre", place))
            if place
            else None
        )
        cells = (
            element("td", str(first.get("time", ""))[:19].replace("T", " ")),
            element("td", f"step {first.get('step', '?')}"),
            element("td", element("span", level.lower(), class_=f"level {level.lower()}")),
            element("td", message, element("b", times), more),
        )
        rows.append(element("tr", *cells, class_="quiet" if level == "INFO" else None))
    loud = sum("quiet" not in row.split(">", 1)[0] for row in rows)
    told = {0: "No warnings or errors", 1: "1 warning or error"}.get(
        loud, f"{loud} warnings and errors"
    ) + f", {len(rows) - loud} events"
    switch = element(
        "label", element("input", type="checkbox", id="all-events"), " show events", class_="js"
    )
    table = element(
        "div",
        element("table", element("tbody", *rows), class_="log"),
        class_="scroll" if loud else "scroll quiet",
    )
    return join(element("div", element("span", told), switch, class_="controls"), table)


def _environment(run: Gathered) -> Html | None:
    if not run.environment:
        return None
    rows = [
        element("tr", element("th", str(key)), element("td", _value(value)))
        for key, value in run.environment.items()
    ]
    return element("table", *rows, class_="plain")

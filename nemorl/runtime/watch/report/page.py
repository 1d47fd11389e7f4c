"""The page of `nemorl report`: one HTML file that needs nothing but itself."""

import base64
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from nemorl.checks import is_number, require
from nemorl.rollout.evaluation import by_prompt, comparison
from nemorl.runtime.config.tree import flat
from nemorl.runtime.config.yaml_io import dump
from nemorl.runtime.store.directory import RunDirectory, to_json
from nemorl.runtime.store.files import write_atomically
from nemorl.runtime.store.record import RunRecord
from nemorl.runtime.watch.curves import RUNS, VARIABLES, Course, svg
from nemorl.runtime.watch.metrics import (
    SECTIONS,
    duration,
    headline,
    is_usual,
    number,
    placed,
    series_of,
    thin,
)
from nemorl.runtime.watch.report.gather import STATISTICS, Gathered
from nemorl.runtime.watch.report.samples import modes, sample_data

HERE = Path(__file__).parent
MOST_POINTS = 1000
ENGINES = {
    "tokens": "generated in a step",
    "tokens_per_second": "while generating",
    "busy": "share of the time of generating in which it computed",
    "restarts": "in a step",
}
Runs = Path | str | Sequence[Path | str]
WATCH_SECONDS = 5.0
"""Time between two looks at a run that is watched."""


def write_report(runs: Runs, output: Path | str | None = None) -> Path:
    """Write the report of a run, or of several side by side, also in progress or crashed.

    output: `report.html` in the run's directory unless given; of several, `comparison.html` in the
    folder that holds them.
    Returns: the file.
    Raises: ValueError where there is no run, or the file can't be written.
    """
    return write_page(read_runs(runs), output)


def watch_runs(runs: Runs, output: Path | str | None = None) -> None:
    """Write the report again when its runs have gone on, until all have ended or Ctrl-C."""
    directories = [RunDirectory.open(path) for path in paths_of(runs)]
    files = [file for run in directories for file in (run.metrics, run.log)]
    seen: list[int] | None = None
    with suppress(KeyboardInterrupt):
        while any(map(is_running, directories)):
            now, start = [file.stat().st_size for file in files if file.exists()], time.monotonic()
            if now != seen:
                write_page(read_runs(runs), output, refresh=WATCH_SECONDS)
            seen = now
            # A run on the same cores should hardly notice.
            time.sleep(max(WATCH_SECONDS, 9 * (time.monotonic() - start)))
    write_page(read_runs(runs), output)


def is_running(directory: RunDirectory) -> bool:
    """Return whether a process runs it."""
    record = RunRecord.read(directory)
    return record is not None and record.present_status == "running"


def read_runs(runs: Runs) -> list[Gathered]:
    """Return what reports show of runs."""
    paths = paths_of(runs)
    steps = [{*RunDirectory(path).sample_sizes()} for path in paths]
    common = max(set.intersection(*steps), default=None)
    found = [Gathered(path, sample_step=common) for path in paths]
    if len({run.name for run in found}) < len(found):
        for run in found:
            run.name = str(run.path)
    return found


def write_page(
    runs: Sequence[Gathered], output: Path | str | None, *, refresh: float | None = None
) -> Path:
    """Write the report of runs that are read."""
    target = runs[0].path / "report.html"
    if len(runs) > 1:
        target = Path(os.path.commonpath([run.path.absolute().parent for run in runs]))
        target /= "comparison.html"
    target = Path(output) if output is not None else target
    page = render(*runs, refresh=refresh)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page)
    except OSError as error:
        why = error.__cause__ or error
        raise ValueError(
            f"output must be a file that can be written, but {target} can't ({why}): name another"
            " one (--output)"
        ) from error
    return target


def paths_of(runs: Runs) -> list[Path]:
    """Return the runs' directories, 1 to 6 different ones."""
    paths = [Path(run) for run in ([runs] if isinstance(runs, Path | str) else runs)]
    places = {path.resolve() for path in paths}
    require(
        len(places) == len(paths) and 1 <= len(paths) <= len(RUNS),
        "runs",
        f"must name 1 to {len(RUNS)} runs, each once",
        [str(path) for path in paths],
        "name each run's directory once: nemorl report runs/a runs/b",
    )
    return paths


def render(*runs: Gathered, refresh: float | None = None) -> str:
    """Return the page, with the runs' texts escaped."""
    style, script = (
        Markup(HERE.joinpath(name).read_text("utf-8")) for name in ("report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    curves = curves_of(*runs)
    by_name = {curve["metric"]: curve for curve in curves}
    shown = headline(*(line for run in runs for line in run.metrics))
    steps = sorted({step for run in runs for step in run.samples})
    data = {
        "curves": [curve["data"] for curve in curves],
        "runs": [sample_data(run) for run in runs],
        "refresh": refresh,
        "opens": max(steps, key=lambda step: (sum(step in run.samples for run in runs), step))
        if steps
        else None,
    }
    return _template().render(
        run=runs[0],
        runs=runs,
        steps=steps,
        style=style,
        script=script,
        digest=digest,
        data=to_json(data),
        refresh=refresh,
        colors=VARIABLES,
        headline=[by_name[name] for name in shown if name in by_name],
        failures=failures(runs[0]),
        receipts=[each for each in runs[0].receipts if each.holds is not None],
        unproved=[each for each in runs[0].receipts if each.holds is None],
        tests=paired_tests(runs),
        groups=grouped(curves),
        modes=modes(*runs),
        statistics=statistics(runs[0]),
        settings=settings(runs[0].config),
        differences=differences(runs),
        yaml=dump(runs[0].config),
        log=merged_log(runs[0].log),
    )


@cache
def _template() -> Template:
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page.filters |= {"number": number, "duration": duration, "moment": _moment, "setting": _setting}
    return page.get_template("page.html")


def curves_of(*runs: Gathered) -> list[dict[str, Any]]:
    """Return every metric that was a number in a run, in the order of `SECTIONS`."""
    lines = [line for run in runs for line in run.metrics]
    names = {name for line in lines for name, value in line.items() if is_number(value)}
    names -= {"step", "time"}

    def section_of(name: str) -> str:
        # Beside a reward the loss says how an update went, not what was learned.
        return "Updates" if name == "loss" and "reward" in names else placed(name)[0]

    curves: list[dict[str, Any]] = []
    order = [*SECTIONS, "Other"]
    for name in sorted(
        names, key=lambda n: (order.index(section_of(n)), placed(n)[1], "/" in n, n)
    ):
        courses = [course_of(run, name) for run in runs]
        metric, trained = placed(name)[2], [train[1] for train, _ in courses]
        validated = any(steps for _, (steps, _) in courses)
        curve: dict[str, Any] = {
            "metric": name,
            "section": section_of(name),
            "title": metric.title,
            "meaning": metric.meaning or ENGINES.get(name.rpartition("/")[2], ""),
            "ends": [ends(course) for course in courses],
            "total": sum(trained[0]),
            "constant": not validated
            and max(map(len, trained)) > 2
            and len(set().union(*trained)) == 1,
            "place": len(curves),
            "data": {},
        }
        values = [value for course in courses for _, series in course for value in series]
        curve["constant"] |= is_usual(name, values)
        if not curve["constant"]:
            shown = [(thin(train, MOST_POINTS), thin(val, MOST_POINTS)) for train, val in courses]
            picture, edges = svg(name, *shown)
            curve["svg"] = Markup(picture)
            curve["data"] = {
                "edges": edges,
                "courses": [
                    [*(() if len(runs) == 1 else (run.name,)), phase, *series]
                    for run, course in zip(runs, shown, strict=True)
                    for phase, series in zip(("training", "validation"), course, strict=True)
                ],
            }
        curves.append(curve)
    return curves


def course_of(run: Gathered, metric: str) -> Course:
    """Return a metric's course."""
    train, validation = (series_of(run.metrics, metric, name) for name in ("train", "validation"))
    return train, validation


def ends(course: Course) -> dict[str, Any] | None:
    """Return a course's first and last value."""
    train, validation = course
    values = validation[1] or train[1]
    if not values:
        return None
    return {
        "phase": "validation" if validation[0] else "training",
        "first": values[0],
        "last": values[-1],
        "now": (train[1] or validation[1])[-1],
        "changed": values[-1] != values[0],
        "once": len(values) == 1,
    }


def differences(runs: Sequence[Gathered]) -> dict[str, list[Any]]:
    """Return settings that differ between runs."""
    flats = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for each in flats for name in each if name != "run.dir")
    found = {name: [each.get(name) for each in flats] for name in names}
    return {name: values for name, values in found.items() if values.count(values[0]) < len(values)}


def paired_tests(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """Return how each run's last validation differs from the first's, over common rows."""
    found: list[dict[str, Any]] = []
    for run in runs[1:]:
        both = by_prompt(runs[0].outcomes), by_prompt(run.outcomes)
        common = [key for key in both[0] if key in both[1]]
        if common:
            lines = comparison(*([r for key in common for r in part[key]] for part in both))
            found += [{"run": run.name, **line} for line in lines]
    return found


def grouped(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return curves by section."""
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
    """Return the phases' shares of the time."""
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
    """Return token counts, and bars of their histogram."""
    found = {}
    for name, numbers in run.data.items():
        rows = {
            label: form.format(numbers[key])
            for key, (label, form) in STATISTICS.items()
            if key in numbers
        }
        bars = numbers.get("histogram", ())
        most = max((1, *(count for _, count in bars)))
        found[name] = {"rows": rows, "bars": bars, "most": most}
    return found


def failures(run: Gathered) -> list[dict[str, Any]]:
    """Return why conversations failed, most frequent first."""
    samples = [line for lines in run.samples.values() for line in lines]
    said = {
        each["failure"].partition(":")[0]: each["failure"] for each in samples if "failure" in each
    }
    found: dict[str, dict[str, Any]] = {}
    for line in run.metrics:
        for name, value in line.items():
            kind, step = name.removeprefix("failed/"), line["step"]
            if kind != name and is_number(value):
                none = {"error": kind, "count": 0, "first": step, "said": said.get(kind, "")}
                row = found.setdefault(kind, none)
                row |= {"count": row["count"] + value, "last": step}
    return sorted(found.values(), key=lambda row: -row["count"])


def settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by section."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = flat(value, f"{key}.")
        else:
            found[""][key] = value
    return {name: values for name, values in found.items() if values}


def merged_log(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each message once, counted."""
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
    if isinstance(value, float) and math.isfinite(value):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return re.sub(r"e([-+])0*", lambda match: "e" + match[1].strip("+"), text)
    return "none" if value is None else json.dumps(to_json(value), ensure_ascii=False)

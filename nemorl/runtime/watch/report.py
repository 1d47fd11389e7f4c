"""What a report shows, read from a run's directory, and its page."""

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from nemorl.checks import is_number, require, warn
from nemorl.rollout.evaluation import by_prompt, comparison
from nemorl.runtime.config.tree import flat
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.store.directory import RunDirectory, RunRecord, read_lines, to_json
from nemorl.runtime.store.files import write_atomically, writing
from nemorl.runtime.store.verify import verify_run
from nemorl.runtime.watch import metrics
from nemorl.runtime.watch.curves import RUNS, VARIABLES, svg

SAMPLE_BYTES = 6_000_000
"""Of samples on a page."""
SHOWN_TOKENS = 4000
"""Longer responses are cut on the page."""


class Gathered:
    """A run as its report shows it, with the samples of `sample_step` besides others. Raises
    ValueError where there is none.
    """

    def __init__(self, path: Path | str, *, sample_step: int | None = None) -> None:
        directory = RunDirectory.open(path)
        self.path, self.name, self.now = directory.path, directory.name, time.time()
        self.record, self.metrics = RunRecord.read(directory), directory.read_metrics()
        self.log = directory.read_log(self.record)
        self.config = _whole(directory.config, lambda path: read(path)[0])
        self.environment = self.config.pop("environment", {})
        self.data = _whole(directory.data, lambda path: {**json.loads(path.read_bytes())})
        judged = [*directory.outcome_files().values()][-1:]
        self.outcomes = [row for file in judged for row in read_lines(file, {"reward": is_number})]
        self.receipts = verify_run(path)
        self.status = self.record.present_status if self.record else "unknown"
        # Of its steps.
        self.seconds = sum(
            line["seconds"] for line in self.metrics if is_number(line.get("seconds"))
        )
        sizes = directory.sample_sizes()
        # Step → responses, with `pieces`: the text of each token, if known.
        self.samples = directory.read_samples({*_spread(sizes), *(sizes.keys() & {sample_step})})
        self.sample_steps = len(sizes)
        _add_pieces(self.samples, directory.path / "tokenizer")
        begun = [line for line in self.log if line.get("event") == "train_begin"]
        # Changed settings, with their defaults.
        self.changed: dict[str, Any] = begun[-1].get("defaults", {}) if begun else {}

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)


def _whole(path: Path, reader: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        return reader(path) if path.exists() else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warn(f"{path} can't be read, and is omitted: {error}")
        return {}


def _spread(sizes: Mapping[int, int]) -> list[int]:
    steps = [*sizes]
    count = min(len(steps), max(2, len(steps) * SAMPLE_BYTES // max(1, sum(sizes.values()))))
    return [steps[round(place * (len(steps) - 1) / max(1, count - 1))] for place in range(count)]


def _add_pieces(samples: dict[int, list[dict[str, Any]]], tokenizer_folder: Path) -> None:
    lines = [line for line in chain(*samples.values()) if line.get("token_ids")]
    if not lines or not tokenizer_folder.exists():
        return
    with suppress(Exception):  # a report without colors is better than none
        decode: Callable[[list[int]], str]
        if (file := tokenizer_folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            decode = partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=False)
        else:
            from nemorl.models.hub import load_tokenizer

            decode = load_tokenizer(str(tokenizer_folder)).decode
        for line in lines:
            line["pieces"] = pieces(decode, line["token_ids"][:SHOWN_TOKENS])


def pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to its neighbors; a character of several tokens belongs
    to the last one.
    """
    found: list[str] = []
    before = start = 0  # ids[before:start] are decoded again, before ids[start:]
    known = ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[before:end]))
        # Half a character, of up to 8 tokens.
        if text.endswith("\ufffd") and end < len(ids) and end - start < 8:
            found.append("")
            continue
        found.append(text[len(known) :])
        before, start = start, end
        known = decode(list(ids[before:start]))
    return found


TEXTS = ("prompt", "response", "chosen", "rejected")
OWN = {
    *(*TEXTS, "reward", "rewards", "advantages", "logprobs", "trainer_logprobs", "worst_tokens"),
    *("token_ids", "pieces", "columns", "finish_reason", "group", "failure", "cut_by", "turns"),
    *("sampled", "trained"),
}
"""Columns that have their own place on the page."""


def sample_data(run: Gathered) -> dict[str, Any]:
    """Return samples by step, and the advantage shown in full color."""
    steps = {step: [_compact(sample) for sample in lines] for step, lines in run.samples.items()}
    found = chain(*(sample.get("advantages", ()) for sample in chain(*steps.values())))
    sizes = sorted(abs(value) for value in found if value)
    most = sizes[math.ceil(0.98 * len(sizes)) - 1] if sizes else 0
    return {"name": run.name, "steps": steps, "most": most}


def _compact(sample: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: text(sample[name]) for name in TEXTS if sample.get(name) is not None
    }
    ids = sample.get("token_ids") or ()
    sampled = sample.get("sampled") or [True] * len(ids)
    if "pieces" in sample:
        found["tokens"] = sample["pieces"]
    if len(ids) > SHOWN_TOKENS:
        found["cut"] = len(ids) - SHOWN_TOKENS
    pairs = zip(sample.get("trainer_logprobs", ()), sample.get("logprobs", ()), strict=False)
    gaps = [pair[0] - pair[1] if all(map(is_number, pair)) else None for pair in pairs]
    lists = {**sample, "gaps": gaps}
    for name in ("logprobs", "gaps", "advantages"):
        if values := lists.get(name):
            found[name] = [
                float(f"{value:.4g}") if own and is_number(value) else None
                for value, own in zip(values[:SHOWN_TOKENS], sampled, strict=False)
            ]
    found |= {name: sample[name] for name in ("reward", "group") if is_number(sample.get(name))}
    found |= {name: sample[name] for name in ("turns", "trained", "failure") if name in sample}
    chips: dict[str, Any] = dict(sample.get("rewards", {}))
    advantages = set(compress(found.get("advantages", ()), sampled))
    if len(advantages) == 1:
        chips["advantage"] = advantages.pop()
    columns = sample.get("columns", {})
    chips |= {name: columns[name] for name in columns if name not in (*TEXTS, "messages")}
    chips |= {name: value for name, value in sample.items() if name not in OWN}
    chips |= {"widest gap": _widest_gap(sample), "tokens": sum(sampled) or None}
    if "cut_by" in sample:
        chips["end"] = f"cut by {sample['cut_by']}"
    elif "failure" not in sample and sample.get("finish_reason") not in (None, "stop"):
        cut = sample["finish_reason"] == "length"
        chips["end"] = "cut at the limit" if cut else sample["finish_reason"]
    found["chips"] = {
        str(name): f"{value:.4g}" if isinstance(value, float) else text(value)[:500]
        for name, value in chips.items()
        if value not in (None, "")
    }
    return found


def _widest_gap(sample: Mapping[str, Any]) -> str:
    for worst in sample.get("worst_tokens", ())[:1]:
        values = worst["logprob"], worst["trainer_logprob"]
        if all(map(is_number, values)) and abs(gap := values[0] - values[1]) >= 0.01:
            factor = metrics.number(math.exp(min(abs(gap), 700)))
            return f"×{factor} in {worst['token']!r} (token {worst['position'] + 1})"
    return ""


def text(value: Any) -> str:
    """Return a prompt or response as text; a conversation turn by turn.

    >>> text([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    'user: 1+1=\\nassistant: 2'
    """
    turns = value if isinstance(value, list) else []
    if turns and all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns)
    return "" if value is None else str(value)


HERE = Path(__file__).parent / "page"
MOST_POINTS = 1000
ENGINES = {
    "tokens": "generated in a step",
    "tokens_per_second": "while generating",
    "busy": "share of the time of generating in which it computed",
    "restarts": "in a step",
}
Runs = Path | str | Sequence[Path | str]
WATCH_SECONDS = 5.0
"""Least time between two reports of a watched run."""


def write_report(runs: Runs, output: Path | str | None = None) -> Path:
    """Write the report of a run, or of several side by side, also in progress or crashed.

    output: by default `report.html` in the run's directory, or of several `comparison.html` in the
    folder that holds them. Returns it. Raises: ValueError where there is no run.
    """
    return write_page(read_runs(runs), output)


def watch_runs(runs: Runs, output: Path | str | None = None) -> None:
    """Write the report again and again, until all its runs have ended or Ctrl-C."""
    with suppress(KeyboardInterrupt):
        start, found = time.monotonic(), read_runs(runs)
        while any(run.status == "running" for run in found):
            write_page(found, output, refresh=WATCH_SECONDS)
            # Leaves nine tenths of a core to the run.
            time.sleep(max(WATCH_SECONDS, 9 * (time.monotonic() - start)))
            start, found = time.monotonic(), read_runs(runs)
    write_page(read_runs(runs), output)


def read_runs(runs: Runs) -> list[Gathered]:
    """Return what a report shows of runs, with the samples of a common step."""
    paths = [Path(run) for run in ([runs] if isinstance(runs, Path | str) else runs)]
    require(
        1 <= len({path.resolve() for path in paths}) == len(paths) <= len(RUNS),
        "runs",
        f"must name 1 to {len(RUNS)} runs, each once",
        [str(path) for path in paths],
        "for example nemorl report runs/a runs/b",
    )
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
    """Write the report of runs that are read. Raises NotWritten."""
    target = Path(output or runs[0].path / "report.html")
    if output is None and len(runs) > 1:
        target = Path(
            os.path.commonpath([run.path.absolute().parent for run in runs]), "comparison.html"
        )
    with writing("the report", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, render(*runs, refresh=refresh), "the report")
    return target


def render(*runs: Gathered, refresh: float | None = None) -> str:
    """Return the page, with the runs' texts escaped."""
    style, script = (Markup((HERE / f"report.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    curves = curves_of(*runs)
    by_name = {curve["metric"]: curve for curve in curves}
    shown = metrics.headline(*(line for run in runs for line in run.metrics))
    steps = sorted({step for run in runs for step in run.samples})
    lines = chain(*chain(*(run.samples.values() for run in runs)))
    data = {
        "curves": [curve["data"] for curve in curves],
        "runs": [sample_data(run) for run in runs],
        "refresh": refresh,
        "opens": max(
            steps, key=lambda step: (sum(step in run.samples for run in runs), step), default=None
        ),
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
        calibration=calibration(runs[0]),
        tests=paired_tests(runs),
        groups=grouped(curves),
        known={key for line in lines if line.get("pieces") for key in line if line[key]},
        statistics=runs[0].data,
        settings=_settings(runs[0].config),
        differences=_differences(runs),
        yaml=dump(runs[0].config),
        log=_merged_log(runs[0].log),
    )


@cache
def _template() -> Template:
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page.filters |= {
        "number": metrics.number,
        "duration": metrics.duration,
        "moment": lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)),
        "setting": _setting,
    }
    return page.get_template("page.html")


def curves_of(*runs: Gathered) -> list[dict[str, Any]]:
    """Return the course of every metric, in the order of `SECTIONS`."""
    lines = [line for run in runs for line in run.metrics]
    names = {name for line in lines for name, value in line.items() if is_number(value)}
    names -= {"step", "time", *(name for name in names if name.startswith("calibration/"))}

    def section_of(name: str) -> str:
        return "Updates" if name == "loss" and "reward" in names else metrics.placed(name)[0]

    curves: list[dict[str, Any]] = []
    order = [*metrics.SECTIONS, "Other"]
    place = lambda n: (order.index(section_of(n)), metrics.placed(n)[1], "/" in n, n)  # noqa: E731
    for name in sorted(names, key=place):
        courses = [metrics.course_of(run.metrics, name) for run in runs]
        metric, trained = metrics.placed(name)[2], [train[1] for train, _ in courses]
        validated = any(steps for _, (steps, _) in courses)
        curve: dict[str, Any] = {
            "metric": name,
            "section": section_of(name),
            "title": metric.title,
            "meaning": metric.meaning or ENGINES.get(name.rpartition("/")[2], ""),
            "ends": [ends(course) for course in courses],
            "total": sum(trained[0]),
            "place": len(curves),
            "data": {},
        }
        values = [value for course in courses for _, series in course for value in series]
        once = max(map(len, trained)) > 2 and len({*values}) == 1
        curve["constant"] = metrics.is_usual(name, values) or (once and not validated)
        if not curve["constant"]:
            shown = [
                (metrics.thin(train, MOST_POINTS), metrics.thin(val, MOST_POINTS))
                for train, val in courses
            ]
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


def ends(course: metrics.Course) -> dict[str, Any] | None:
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


def _differences(runs: Sequence[Gathered]) -> dict[str, list[Any]]:
    flats = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for each in flats for name in each if name != "run.dir")
    found = {name: [each.get(name) for each in flats] for name in names}
    return {name: values for name, values in found.items() if values.count(values[0]) < len(values)}


def paired_tests(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """Return how last validations differ from the first run's, over common rows."""
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
            "shares": _time_shares(members),
        }
        for section, members in sections.items()
    ]


def _time_shares(curves: list[dict[str, Any]]) -> dict[str, float]:
    totals = {each["metric"]: each["total"] for each in curves}
    whole = totals.get("seconds", 0.0)
    parts = {name: total for name, total in totals.items() if name.startswith("seconds_")}
    if not parts or whole <= 0:
        return {}
    shares = {name[8:].replace("_", " "): total / whole for name, total in parts.items()}
    rest = 1 - sum(shares.values())
    return shares | ({"other": rest} if rest > 0.005 else {})


def failures(run: Gathered) -> list[dict[str, Any]]:
    """Return why conversations failed, most frequent first."""
    texts = [each["failure"] for each in chain(*run.samples.values()) if "failure" in each]
    said = {text.partition(":")[0]: text for text in texts}
    found: dict[str, dict[str, Any]] = {}
    for line in run.metrics:
        for name, value in line.items():
            kind, step = name.removeprefix("failed/"), line["step"]
            if kind != name and is_number(value):
                row = found.setdefault(
                    kind, {"error": kind, "count": 0, "first": step, "said": said.get(kind, "")}
                )
                row |= {"count": row["count"] + value, "last": step}
    return sorted(found.values(), key=lambda row: -row["count"])


def calibration(run: Gathered) -> list[dict[str, Any]]:
    """Return the last validation's pairs by their predicted probability."""
    found: dict[str, dict[str, Any]] = {}
    for line in [line for line in run.metrics if "calibration_error" in line][-1:]:
        for name, value in line.items():
            if name.startswith("calibration/"):
                _, low, key = name.split("/")
                found.setdefault(low, {"low": float(low)})[key] = value
    return [*found.values()]


def _settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections = {
        key: flat(each, f"{key}.") for key, each in config.items() if isinstance(each, dict)
    }
    found = {"": {key: each for key, each in config.items() if key not in sections}, **sections}
    return {name: values for name, values in found.items() if values}


def _merged_log(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for line in log:
        key = str(line.get("level")), str(line.get("message"))
        merged.setdefault(key, {**line, "times": 0})["times"] += 1
    return list(merged.values())


def _setting(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    return "none" if value is None else json.dumps(to_json(value), ensure_ascii=False)

"""What a report shows, read from a run's directory.

Whatever a run in progress, or one that crashed, has not written is left out.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.runtime.config.tree import flat, to_dict
from nemorl.runtime.config.yaml_io import ConfigError, read
from nemorl.runtime.run.directory import RunDirectory, read_lines, step_of
from nemorl.runtime.run.record import RunRecord, read_record, status_of
from nemorl.runtime.start.registry import get_algorithm

SAMPLE_BYTES = 6_000_000
"""Size of the sample files that a page takes in; of a longer run it shows evenly spaced steps."""
SAMPLE_STEPS = 150
SHOWN_TOKENS = 4000
"""Longer responses are cut on the page, and say so."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A run as its report shows it."""

    name: str
    record: RunRecord | None
    status: str
    """running, finished, interrupted or failed; unknown for a run that kept no run.json."""
    metrics: list[dict[str, Any]]
    seconds: float
    """During which a process worked on the run."""
    samples: dict[int, list[dict[str, Any]]]
    """Step → responses, with `pieces`: the text of each token where the tokenizer is known."""
    sample_steps: int
    """How many steps have samples, shown or not."""
    config: dict[str, Any]
    changed: dict[str, Any]
    """Settings that are not at their default (dotted), with that default; empty where the algorithm
    is not known.
    """
    environment: dict[str, Any]
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Statistics of the token counts, per data set."""
    log: list[dict[str, Any]]
    now: float

    @property
    def step(self) -> int:
        return max(
            (line["step"] for line in self.metrics if isinstance(line.get("step"), int)), default=0
        )

    @property
    def total_steps(self) -> int | None:
        return self.record.total_steps if self.record else None


def gather(path: Path | str, *, now: float | None = None) -> Gathered:
    """Everything about a run. Raises ValueError where there is no run."""
    directory = RunDirectory.open(path)
    now = time.time() if now is None else now
    record, metrics = read_record(directory), directory.read_metrics()
    config = _read_yaml(directory.config)
    environment = config.pop("environment", {})
    files = sorted(
        (file for file in directory.samples.glob("step_*.jsonl") if step_of(file) >= 0), key=step_of
    )
    samples = {step_of(file): read_lines(file) for file in spread(files)}
    log = [
        line
        for line in read_lines(directory.log)
        if record is None or line.get("run_id") == record.run_id
    ]
    return Gathered(
        name=directory.name,
        record=record,
        status=status_of(record) if record else "unknown",
        metrics=metrics,
        seconds=working_seconds(record, metrics, now=now),
        samples={
            step: lines
            for step, lines in with_pieces(samples, directory.path / "tokenizer").items()
            if lines
        },
        sample_steps=len(files),
        config=config,
        changed=changed_settings(record.algorithm, config) if record else {},
        environment=environment if isinstance(environment, dict) else {},
        data=_statistics(directory.data),
        log=log,
        now=now,
    )


def spread(files: Sequence[Path]) -> list[Path]:
    """Evenly spaced files, the first and the last among them, that together are not too large for a
    page.
    """
    size = sum(file.stat().st_size for file in files)
    count = min(len(files), SAMPLE_STEPS, max(2, len(files) * SAMPLE_BYTES // max(1, size)))
    return [files[round(place * (len(files) - 1) / max(1, count - 1))] for place in range(count)]


def working_seconds(
    record: RunRecord | None, metrics: Sequence[Mapping[str, Any]], *, now: float
) -> float:
    """How long processes have worked on a run, without the time between them: each from its begin
    to the last that is heard of it.
    """
    times = [line["time"] for line in metrics if isinstance(line.get("time"), int | float)]
    if record is None or not record.sessions:
        return max(times) - min(times) if times else 0.0
    total = 0.0
    for start, end in zip(record.sessions, [*record.sessions[1:], float("inf")], strict=True):
        heard = [moment for moment in times if start <= moment < end]
        if end == float("inf"):
            heard += (
                [now] if status_of(record) == "running" else [record.ended] if record.ended else []
            )
        total += max(heard, default=start) - start
    return total


def changed_settings(algorithm: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings (dotted) that differ from the algorithm's defaults, and those defaults."""
    try:
        defaults = flat(to_dict(get_algorithm(algorithm).config()))
    except (
        ValueError,
        TypeError,
    ):  # an algorithm of the user's own that this process has not heard of
        return {}
    return {
        key: defaults.get(key)
        for key, value in flat(config).items()
        if key not in defaults or defaults[key] != value
    }


def with_pieces(
    samples: dict[int, list[dict[str, Any]]], tokenizer_folder: Path
) -> dict[int, list[dict[str, Any]]]:
    """The samples with the text of each token, where their ids are there and the run's tokenizer
    can be loaded.
    """
    if not tokenizer_folder.exists() or not any(
        sample.get("token_ids") for lines in samples.values() for sample in lines
    ):
        return samples
    from nemorl.models.pretrained import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(tokenizer_folder))
    except Exception:  # a report without colours is better than none
        return samples

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    for sample in (sample for lines in samples.values() for sample in lines):
        ids = sample.get("token_ids")
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            try:
                sample["pieces"] = pieces(decode, ids[:SHOWN_TOKENS])
            except Exception:  # ids that the tokenizer does not know
                sample.pop("pieces", None)
    return samples


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; together they are the whole text.

    A token is decoded after its neighbours, because a tokenizer may join or space them. Of a
    character that is spread over several tokens the last one has it, the others are empty.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), list("año".encode()))
    ['a', '', 'ñ', 'o']
    """
    found: list[str] = []
    before = start = 0  # ids[before:start] are decoded again, as the surroundings of ids[start:]
    known = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[before:end])
        if (
            text.endswith("\ufffd") and end < len(ids) and end - start < 8
        ):  # half a character; 8: no character is that long
            found.append("")
            continue
        found.append(text[len(known) :])
        before, start = start, end
        known = decode(ids[before:start])
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return read(path)[0]
    except ConfigError:
        return {}


def _statistics(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(name): value for name, value in tree.items() if isinstance(value, dict)}
        if isinstance(tree, dict)
        else {}
    )

"""What a report shows, read from a run's directory, also of a run in progress or a crashed one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.runtime.config.yaml_io import ConfigError, read
from nemorl.runtime.run.directory import RunDirectory, read_lines, step_of
from nemorl.runtime.run.record import RunRecord, read_record, status_of

SAMPLE_BYTES = 6_000_000
"""Size of the sample files that a page holds; of a longer run it shows evenly spaced steps."""
SAMPLE_STEPS = 150
SHOWN_TOKENS = 4000
"""Longer responses are cut on the page, which says so."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A run as its report shows it."""

    name: str
    record: RunRecord | None
    status: str
    """running, finished, interrupted or failed; unknown for a run without run.json."""
    metrics: list[dict[str, Any]]
    seconds: float
    """During which a process worked on the run."""
    samples: dict[int, list[dict[str, Any]]]
    """Step → responses, with `pieces`: the text of each token where the tokenizer is known."""
    sample_steps: int
    """How many steps have samples, shown or not."""
    config: dict[str, Any]
    changed: dict[str, Any]
    """Settings that are not at their default (dotted), with that default."""
    environment: dict[str, Any]
    data: dict[str, dict[str, Any]]
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
    """Return everything about a run. Raises ValueError where there is no run."""
    directory = RunDirectory.open(path)
    now = time.time() if now is None else now
    record, metrics = read_record(directory), directory.read_metrics()
    try:
        config = read(directory.config)[0]
    except ConfigError:
        config = {}
    environment = config.pop("environment", {})
    files = sorted(
        (file for file in directory.samples.glob("step_*.jsonl") if step_of(file) >= 0), key=step_of
    )
    samples = {step_of(file): lines for file in spread(files) if (lines := read_lines(file))}
    log = [
        line
        for line in read_lines(directory.log)
        if record is None or line.get("run_id") == record.run_id
    ]
    changed = [line.get("defaults") for line in log if line.get("event") == "train_begin"]
    return Gathered(
        name=directory.name,
        record=record,
        status=status_of(record) if record else "unknown",
        metrics=metrics,
        seconds=working_seconds(record, metrics, now=now),
        samples=with_pieces(samples, directory.path / "tokenizer"),
        sample_steps=len(files),
        config=config,
        changed=changed[-1] if changed and isinstance(changed[-1], dict) else {},
        environment=environment if isinstance(environment, dict) else {},
        data=directory.read_data(),
        log=log,
        now=now,
    )


def spread(files: Sequence[Path]) -> list[Path]:
    """Return evenly spaced files, with the first and the last, that fit on a page."""
    size = sum(file.stat().st_size for file in files)
    count = min(len(files), SAMPLE_STEPS, max(2, len(files) * SAMPLE_BYTES // max(1, size)))
    return [files[round(place * (len(files) - 1) / max(1, count - 1))] for place in range(count)]


def working_seconds(
    record: RunRecord | None, metrics: Sequence[Mapping[str, Any]], *, now: float
) -> float:
    """Return how long processes worked on a run: each from its begin to its last sign of life."""
    times = [line["time"] for line in metrics if isinstance(line.get("time"), int | float)]
    if record is None or not record.sessions:
        return max(times) - min(times) if times else 0.0
    end = now if status_of(record) == "running" else record.ended
    times += [end] if end else []
    total = 0.0
    for start, following in zip(record.sessions, [*record.sessions[1:], float("inf")], strict=True):
        total += max((each for each in times if start <= each < following), default=start) - start
    return total


def with_pieces(
    samples: dict[int, list[dict[str, Any]]], tokenizer_folder: Path
) -> dict[int, list[dict[str, Any]]]:
    """Return the samples with the text of each token, where ids and tokenizer are known."""
    lines = [line for lines in samples.values() for line in lines if line.get("token_ids")]
    if not lines or not tokenizer_folder.exists():
        return samples
    from nemorl.models.pretrained import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(tokenizer_folder))
    except Exception:  # a report without colors is better than none
        return samples
    for line in lines:
        try:
            line["pieces"] = pieces(tokenizer.decode, line["token_ids"][:SHOWN_TOKENS])
        except Exception:  # ids that the tokenizer does not know
            line.pop("pieces", None)
    return samples


def pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; together they are the whole text.

    A token is decoded after its neighbors, because a tokenizer may join or space them. A character
    of several tokens belongs to the last one; the others are empty.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), list("año".encode()))
    ['a', '', 'ñ', 'o']
    """
    found: list[str] = []
    before = start = 0  # ids[before:start] are decoded again, as the surroundings of ids[start:]
    known = ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[before:end]))
        # Half a character, which has no more than 8 tokens.
        if text.endswith("\ufffd") and end < len(ids) and end - start < 8:
            found.append("")
            continue
        found.append(text[len(known) :])
        before, start = start, end
        known = decode(list(ids[before:start]))
    return found

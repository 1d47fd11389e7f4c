"""The contents of a run's files, to be shown. Wrong values are omitted with a warning."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemorl.checks import is_number
from nemorl.data.statistics import LengthStatistics
from nemorl.runtime.config.yaml_io import ConfigError, read
from nemorl.runtime.store.directory import RunDirectory, read_lines
from nemorl.runtime.store.record import RunRecord
from nemorl.runtime.store.shapes import (
    Shape,
    fields_of,
    is_count,
    is_flag,
    is_mapping,
    is_text,
    list_of,
    optional,
    without_wrong,
)
from nemorl.warn import warn

NUMBERS = list_of(optional(is_number))
SAMPLE: dict[str, Shape] = {
    "rewards": is_mapping,
    "columns": is_mapping,
    "token_ids": list_of(is_count),
    "pieces": list_of(is_text),
    **dict.fromkeys(("sampled", "trained"), list_of(is_flag)),
    "turns": list_of(
        fields_of(
            given=is_text,
            response=is_text,
            reward=optional(is_number),
            tokens=lambda ends: list_of(is_count)(ends) and len(ends) == 2,
        )
    ),
    **dict.fromkeys(("failure", "cut_by"), is_text),
    **dict.fromkeys(("logprobs", "trainer_logprobs", "advantages"), NUMBERS),
    "worst_tokens": list_of(
        fields_of(
            position=is_count,
            token=is_text,
            logprob=optional(is_number),
            trainer_logprob=optional(is_number),
        )
    ),
}
"""Shapes of the values in samples/*.jsonl that are used in more ways than shown."""
OUTCOME: dict[str, Shape] = {
    **{"data": is_text, "group": is_count, "prompt": is_text},
    **{"reward": is_number, "correct": is_flag},
}
"""Shapes of the values in validation/*.jsonl."""
LENGTHS: dict[str, Shape] = {
    **{field.name: is_number for field in fields(LengthStatistics)},
    "histogram": list_of(lambda bar: list_of(is_count)(bar) and len(bar) == 2),
}
"""Shapes of the values in data.json."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run's files."""

    record: RunRecord | None
    metrics: list[dict[str, Any]]
    config: dict[str, Any]
    """The settings."""
    environment: dict[str, Any]
    """Versions and host that config.yaml names."""
    data: dict[str, dict[str, Any]]
    """Lengths of each data set, by its name."""
    log: list[dict[str, Any]]
    """Messages of this run, not of another that was in its folder before."""
    outcomes: list[dict[str, Any]]
    """How the answers of the last validation were judged."""
    samples: dict[int, Path]
    """File of each step with samples; see `read_samples`."""


def read_run(directory: RunDirectory) -> RunFiles:
    """Return the contents of a run's files, besides its samples, which may be large."""
    record, config = RunRecord.read(directory), _read_config(directory)
    environment = config.pop("environment", {})
    judged = [*directory.sample_files("validation").values()]
    log = read_lines(directory.log, known={"defaults": is_mapping})
    return RunFiles(
        record=record,
        metrics=directory.read_metrics(),
        config=config,
        environment=environment,
        data=_read_data(directory),
        log=[line for line in log if record is None or line.get("run_id") == record.run_id],
        outcomes=read_lines(judged[-1], OUTCOME) if judged else [],
        samples=directory.sample_files(),
    )


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Return the responses in a file of samples."""
    return read_lines(file, known=SAMPLE)


def _read_config(directory: RunDirectory) -> dict[str, Any]:
    """Return the contents of config.yaml; what can't be read is warned of."""
    if not directory.config.exists():
        return {}
    try:
        return without_wrong(
            read(directory.config)[0], {"environment": is_mapping}, str(directory.config)
        )
    except ConfigError as error:
        warn(f"the settings are omitted: {error}")
        return {}


def _read_data(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    """Return the contents of data.json; what can't be read is warned of."""
    if not directory.data.exists():
        return {}
    try:
        found = {**json.loads(directory.data.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        warn(f"{directory.data} is not a JSON object, and is omitted")
        return {}
    found = without_wrong(found, dict.fromkeys(found, is_mapping), str(directory.data))
    return {
        name: without_wrong(numbers, LENGTHS, f"{directory.data}, {name},")
        for name, numbers in found.items()
    }

"""The contents of a run's files, to be shown."""

import json
from dataclasses import dataclass
from typing import Any

from nemorl.checks import is_number
from nemorl.runtime.config.yaml_io import ConfigError, read
from nemorl.runtime.store.directory import RunDirectory, read_lines
from nemorl.runtime.store.record import RunRecord
from nemorl.warn import warn


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
    samples: dict[int, int]
    """Bytes of each step's samples."""


def read_run(directory: RunDirectory) -> RunFiles:
    """Return the contents of a run's files."""
    record, config = RunRecord.read(directory), _read_config(directory)
    environment = config.pop("environment", {})
    judged = [*directory.outcome_files().values()]
    log = read_lines(directory.log)
    return RunFiles(
        record=record,
        metrics=directory.read_metrics(),
        config=config,
        environment=environment,
        data=_read_data(directory),
        log=[line for line in log if record is None or line.get("run_id") == record.run_id],
        outcomes=read_lines(judged[-1], {"reward": is_number}) if judged else [],
        samples=directory.sample_sizes(),
    )


def _read_config(directory: RunDirectory) -> dict[str, Any]:
    """Return the contents of config.yaml; what can't be read is warned of."""
    if not directory.config.exists():
        return {}
    try:
        return read(directory.config)[0]
    except ConfigError as error:
        warn(f"the settings are omitted: {error}")
        return {}


def _read_data(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    """Return the contents of data.json; what can't be read is warned of."""
    if not directory.data.exists():
        return {}
    try:
        return {**json.loads(directory.data.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        warn(f"{directory.data} is not a JSON object, and is omitted")
        return {}

"""A folder that several processes write together: each says when its part is on the disk, and what
it is.

There is no collective call in this, so that it can be waited for in a thread while training goes
on, and by a process that is none of the writers.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGINNING = "written-"
POLL_S = 0.02
RESERVED = 4096
"""Bytes of a report that always find room."""


@dataclass(frozen=True)
class Written:
    """A file on the disk, as it should be."""

    size: int
    sha256: str


def reserve(folder: Path, rank: int, size: int) -> None:
    """Begin: take back what `rank`, one of `size`, said of an earlier attempt, and make sure that
    there is room for what it will say.
    """
    _report_of(folder, rank, size).unlink(missing_ok=True)
    with _aside(folder, rank, size).open("w", encoding="utf-8") as file:
        file.write(" " * RESERVED)
        file.flush()
        os.fsync(file.fileno())


def begun(folder: Path) -> int:
    """How many ranks' beginnings can be seen from here."""
    return sum(path.name.startswith(f".{BEGINNING}") for path in folder.iterdir())


def report(
    folder: Path,
    rank: int,
    size: int,
    files: dict[str, Written] | None = None,
    *,
    error: str | None = None,
) -> None:
    """Say that `rank` has written these files, by name, or why it could not; on a full disk, too."""
    values = {
        "files": {name: asdict(file) for name, file in (files or {}).items()},
        "error": error if error is None else error[: RESERVED // 8],
    }
    aside = _aside(folder, rank, size)
    with (
        suppress(OSError),
        aside.open("r+", encoding="utf-8") as file,
    ):  # in its place, as there may be no other
        file.write(json.dumps(values))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    aside.replace(_report_of(folder, rank, size))


def wait_for_all(folder: Path, size: int, *, check: Callable[[], None] = lambda: None) -> None:
    """Return when all of `size` ranks have written their part. `check` is called again and again
    meanwhile; what it raises ends the waiting.

    Raises OSError that names the rank and what it said if one of them could not.
    """
    wanted = {_report_of(folder, rank, size).name: rank for rank in range(size)}
    while wanted:
        present = {
            path.name for path in folder.iterdir()
        }  # reads the folder anew, where asking for a file may be answered from a cache
        for name in sorted(wanted.keys() & present):
            rank, error = wanted.pop(name), _read(folder / name)["error"]
            if error is not None:
                raise OSError(
                    error
                    if size == 1
                    else f"rank {rank} of {size} could not write its part: {error}"
                )
        if wanted:
            check()
            time.sleep(POLL_S)


def files_of(folder: Path) -> dict[str, Written]:
    """All that has been reported, by the files' names in the folder.

    Raises OSError if a file is not there as it was reported.
    """
    found: dict[str, Written] = {}
    for path in sorted(folder.glob(f"{BEGINNING}*.json")):
        found |= {name: Written(**file) for name, file in _read(path)["files"].items()}
    for name, file in found.items():
        size = (folder / name).stat().st_size
        if size != file.size:
            raise OSError(f"{folder / name} has {size} bytes, but {file.size} were written")
    return found


def clear(folder: Path) -> None:
    """Remove the reports."""
    for path in folder.glob(f"{BEGINNING}*.json"):
        path.unlink()


def _aside(folder: Path, rank: int, size: int) -> Path:
    return folder / f".{_report_of(folder, rank, size).name}"


def _report_of(folder: Path, rank: int, size: int) -> Path:
    return folder / f"{BEGINNING}{rank + 1:05}-of-{size:05}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {"files": {}, "error": f"not even its report in {path.parent}: is the disk full?"}

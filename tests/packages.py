"""The files that say which packages are installed."""

from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def lines(name: str) -> list[str]:
    return [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]


def wanted(requirements: Iterable[str], extras: Iterable[str] = ("",)) -> list[Requirement]:
    """The requirements that this machine has to meet."""
    return [
        one
        for one in map(Requirement, requirements)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]

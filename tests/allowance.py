"""A pytest plugin: what a test may cost. `make test` answers in minutes only if each test is small.

A test takes less than a second of CPU, or is one of the whole paths in tests/whole_paths.py, or is
marked slow. CPU time is that of the test process and all below it: no clock judges, so a busy
machine changes little. The run's last lines list the tests over their allowance; one that takes
five times its own fails.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.whole_paths import WHOLE_PATHS

ALLOWANCE_S = 1.0
WHOLE_PATH_S = 30.0
FACTOR = 5
TICKS = os.sysconf("SC_CLK_TCK")
over: dict[str, tuple[float, float]] = {}


def cpu_ticks() -> int | None:
    """CPU time of this process and all below it, also of those that were waited for.

    None where it can't be read: without /proc, or where processes end faster than one can look.
    """
    for _ in range(5):
        with suppress(OSError):
            return ticks_of(os.getpid())
    return None


def ticks_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, stat[11:15]))  # user and system, of itself and of ended children
    for thread in Path(f"/proc/{pid}/task").iterdir():
        ticks += sum(ticks_of(int(child)) for child in (thread / "children").read_text().split())
    return ticks


def allowance_s(item: pytest.Item) -> float:
    """CPU seconds that a test may take."""
    if item.get_closest_marker("slow"):
        return float("inf")
    name = item.nodeid.partition("@")[0]  # xdist appends its group
    known = name in WHOLE_PATHS or name.partition("[")[0] in WHOLE_PATHS
    return WHOLE_PATH_S if known else ALLOWANCE_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # Twice: a list of children can lack one while another ends.
    before = max(cpu_ticks() or 0, cpu_ticks() or 0)
    yield
    seconds = ((cpu_ticks() or 0) - before) / TICKS if before else 0.0
    allowed = allowance_s(item)
    if seconds > allowed:
        item.user_properties.append(("over", (seconds, allowed)))
    if seconds > FACTOR * allowed:
        pytest.fail(
            f"this test took {seconds:.1f} s of CPU, {FACTOR} times its allowance of {allowed:g} s:"
            " make it cheaper, or mark it slow (tests/allowance.py)",
            pytrace=False,
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        for name, value in report.user_properties:
            if name == "over":
                over[report.nodeid] = tuple(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if over:
        terminalreporter.section(f"{len(over)} tests over their allowance of CPU time")
    for nodeid, (seconds, allowed) in sorted(over.items(), key=lambda one: -one[1][0]):
        terminalreporter.line(f"{seconds:6.1f} s of {allowed:g} s: {nodeid}")

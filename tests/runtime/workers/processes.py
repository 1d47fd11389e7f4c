"""Whether processes are there, and programs whose facts tests read."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def alive(*pids: int) -> list[int]:
    """Which of the processes are there and run; a zombie doesn't."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:  # FileNotFoundError, and ProcessLookupError where it ends while it is read
        return ""
    return stat.rpartition(")")[2].split()[0]


def eventually(condition: Callable[[], Any], timeout_s: float = 120) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def soon_gone(*pids: int) -> bool:
    return eventually(lambda: not alive(*pids))


@contextmanager
def driver(
    forked: Path,
    *arguments: str,
    module: str = "tests.runtime.workers.drivers",
    **variables: str,
) -> Iterator[subprocess.Popen]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [forked / "python", "-m", module, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env={**environment, **variables}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def facts_of(process: subprocess.Popen) -> dict[str, Any]:
    """The line of JSON; Ray may print others."""
    line = next((line for line in process.stdout if line.startswith("{")), "")
    assert line, f"exit code {process.wait()}"
    return json.loads(line)

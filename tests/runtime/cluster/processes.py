"""Whether processes are there."""

import time
from pathlib import Path


def alive(*pids: int) -> list[int]:
    """Which of the processes are there and run; a zombie doesn't."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:  # FileNotFoundError, and ProcessLookupError where it ends while it is read
        return ""
    return stat.rpartition(")")[2].split()[0]


def soon_gone(*pids: int, timeout_s: float = 120) -> bool:
    deadline = time.monotonic() + timeout_s
    while alive(*pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(*pids)

"""Whether processes are there."""

import time
from pathlib import Path


def alive(*pids: int) -> list[int]:
    """Which of the processes are there and run; a zombie doesn't."""
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}").exists()
        and " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    ]


def soon_gone(*pids: int, timeout_s: float = 120) -> bool:
    deadline = time.monotonic() + timeout_s
    while alive(*pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(*pids)

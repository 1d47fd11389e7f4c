"""Run the parts, and write down what they find: `python -m benchmarks.gpu --help`."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

try:
    import tyro
except ModuleNotFoundError as error:
    sys.exit(f"the GPU kit needs tyro ({error}): pip install -r benchmarks/gpu/requirements.txt")

from benchmarks.gpu import MARK
from nemorl.checks import require

ROOT = Path(__file__).parent.parent.parent
SHARES = {"first": 1, "correct": 5, "train": 5, "generate": 4, "memory": 3, "weights": 2, "head": 1}
"""Of the time; what users meet first comes first."""
LEAST_S = dict.fromkeys(SHARES, 60.0) | {"first": 40.0, "head": 20.0}
"""Seconds without which a part would show nothing; one that begins has them, if they are left."""
PROOFS = ("first", "correct")
"""Parts whose goals are about numbers, not about speed."""
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
Part = Literal["first", "correct", "train", "generate", "memory", "weights", "head"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prove the library on this GPU, and measure it. Exit status 1: something failed."""

    part: tuple[Part, ...] = tuple(SHARES)
    """Parts to run; the others' earlier results are kept."""
    minutes: float = 25
    """Time for all of them; what a part leaves goes to the next. One minute gives a first page."""
    write: Path | None = None
    """Page for the results, as docs/performance.md, with a JSON beside it. Default: runs/gpu.md."""
    small: bool = False
    """Run on the CPU in seconds, which shows that the kit works and measures nothing."""

    def __post_init__(self) -> None:
        require(self.minutes > 0, "minutes", "must be positive", self.minutes, "try 25")
        folder = (self.write or Path()).parent
        require(folder.is_dir(), "write", "must be in a folder", str(self.write), f"make {folder}")


def rows(command: list[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the rows that a process prints, and one more if it fails or takes too long."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    late = threading.Event()

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, lambda: (late.set(), end()))
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                print(line, end="", file=sys.stderr)
        process.wait()
    finally:
        timer.cancel()
        end()
    if late.is_set():
        yield {"what": "the rest", "skipped": f"the part's {limit_s:.0f} s were over"}
    elif process.returncode:
        yield {"what": "the rest", "failed": f"the process ended with code {process.returncode}"}


def left_out(left: float, least: float) -> dict[str, Any]:
    """Return the row of a part that is not begun."""
    return {
        "what": "all of it",
        "skipped": f"needs {least:.0f} s, and {left:.0f} are left: raise --minutes",
    }


def outcome(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return value, goal and note as text."""
    if reason := row.get("skipped"):
        return "skipped", "", reason
    if reason := row.get("failed"):
        return "**failed**", "", reason
    verdict = {True: ": met", False: ": **missed**", None: ""}[row["met"]]
    return f"{row['value']:.4g}", row["goal"] + verdict, row["note"]


def page(results: dict[str, Any]) -> str:
    """Return the tables of all devices."""
    lines = []
    for name, found in results.items():
        versions = ", ".join(f"{what} {which}" for what, which in found["versions"].items())
        lines += [f"### {name}", "", f"{found['date']}; {versions}", ""]
        lines += ["| part | | measured | goal | |", "|---|---|---|---|---|"]
        for part in filter(found["parts"].__contains__, SHARES):
            for row in found["parts"][part]:
                cells = [part, row["what"], *outcome(row)]
                lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the page's part between the marks, and the JSON, so that a kill leaves whole files."""
    old = path.read_text(encoding="utf-8") if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    text = f"{before}{BEGIN}\n\n{page(results)}\n{END}{rest.partition(END)[2]}"
    for target, content in (
        (path.with_suffix(".json"), json.dumps(results, indent=1)),
        (path, text),
    ):
        aside = target.with_name(target.name + ".part")
        aside.write_text(content, encoding="utf-8")
        aside.replace(target)


def main(options: Options) -> int:
    path = options.write or Path("runs") / "gpu.md"
    path.parent.mkdir(exist_ok=True)
    stored = path.with_suffix(".json")
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    end, failed = time.monotonic() + 60 * options.minutes, False
    parts = [name for name in SHARES if name in options.part]
    found: dict[str, Any] = {"parts": {}}
    for place, name in enumerate(parts):
        share = SHARES[name] / sum(SHARES[each] for each in parts[place:])
        left, least = max(1.0, end - time.monotonic()), LEAST_S[name]
        if place and left < least:
            row = left_out(left, least)
            found["parts"].setdefault(name, [row])  # or an earlier result
            print("  ".join([name, *outcome(row)]))
            write(path, results)
            continue
        # A rest in which no later part could begin is this one's.
        limit, rest = min(left, max(least, share * left)), parts[place + 1 :]
        if left - limit < min((LEAST_S[each] for each in rest), default=math.inf):
            limit = left
        command = [sys.executable, "-m", "benchmarks.gpu.part", name, *["--small"] * options.small]
        found = {"parts": {name: []}}
        for row in rows(command, limit):
            if "refused" in row:
                print(row["refused"], file=sys.stderr)
                return 2
            if "device" in row:
                found = results.setdefault(row["device"], {"parts": {}})
                found |= {"date": time.strftime("%Y-%m-%d"), "versions": row["versions"]}
                found["parts"][name] = []
                print(f"{name} ({row['device']})")
            else:
                found["parts"][name].append(row)
                print("  " + "   ".join(filter(None, [row["what"], *outcome(row)])), flush=True)
                failed |= "failed" in row or (name in PROOFS and row.get("met") is False)
            write(path, results)
    print(f"written to {path} and {stored}")
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(tyro.cli(Options)))

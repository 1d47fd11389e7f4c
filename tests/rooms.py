"""Run every test, room by room, and say what ran: `make test-all`, `make test-all ROOM=rollout`."""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rooms() -> dict[str, list[str]]:
    """The paths of each room by its name: its tests, and the examples in its docstrings."""
    found = {}
    for base in (ROOT / "nemorl", ROOT / "nemorl" / "runtime"):
        for folder in sorted(path.parent for path in base.glob("*/__init__.py")):
            where = folder.relative_to(ROOT / "nemorl")
            if folder.name != "runtime":
                both = [ROOT / "tests" / where, folder]
                found[folder.name] = [str(path) for path in both if path.exists()]
    tests = ROOT / "tests"
    here = (*tests.glob("test_*.py"), tests / "tools", *(ROOT / "nemorl").glob("*.py"))
    return found | {"house": [str(path) for path in here]}


def main(chosen: list[str]) -> int:
    """Run the tests of the chosen rooms, or of all; return how many rooms failed."""
    found = rooms()
    if unknown := set(chosen) - found.keys():
        sys.exit(f"ROOM must be one of {', '.join(found)}, not {', '.join(sorted(unknown))}")
    rows, failed = [], 0
    for room in chosen or found:
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rs"]
        with subprocess.Popen(
            [*command, *found[room]], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None
            last = ""
            for line in run.stdout:
                print(line, end="", flush=True)
                last = line.strip(" =\n") if re.search(r"\d+ (passed|failed|error)", line) else last
        failed += run.returncode != 0
        minutes, ended = (time.monotonic() - started) / 60, "failed" if run.returncode else "ok"
        rows.append(f"{room:12} {ended:6} {minutes:5.1f} min  {last}")
    print("\n".join(["", *rows]))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

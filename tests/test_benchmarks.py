"""Every benchmark runs, in the small form that takes seconds and measures nothing."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, tmp_path: Path):
    if name.endswith("_trl") and find_spec("trl") is None:
        pytest.skip("needs TRL, in an environment of its own: make bench-peers")
    if name in ("rollouts", "weight_sync") and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    path = FOLDER / f"{name}.py"
    small = ["--small"] if re.search(r"\bcommand\(\s*main", path.read_text()) else []
    done = subprocess.run(
        [sys.executable, str(path), *small],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip(), "it prints what it measures"

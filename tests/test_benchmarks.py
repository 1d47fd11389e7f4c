"""Every benchmark runs, in the small form that takes seconds and measures nothing."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forked import ROOT, succeeded

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
PEERS = [name for name in SCRIPTS if name.endswith("_vs_trl")]


def output(python: str | Path, name: str, *options: str, cwd: Path) -> str:
    script = FOLDER / f"{name}.py"
    return succeeded(python, script, *options, cwd=cwd, PYTHONPATH=str(ROOT)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in PEERS])
def test_it_runs(name: str, tmp_path: Path):
    engines = ("asynchrony", "conversations", "endpoint", "rollouts", "weight_sync")
    if name in engines and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    script = (FOLDER / f"{name}.py").read_text()
    small = ["--small"] if re.search(r"\bcommand\(\s*main", script) else []
    assert output(sys.executable, name, *small, cwd=tmp_path).strip(), "it prints what it measures"


@pytest.mark.parametrize("name", PEERS)
def test_the_half_that_is_ours_runs_without_the_peer(name: str, forked: Path, tmp_path: Path):
    text = output(forked / "python", name, "--small", "--no-peer", cwd=tmp_path)
    assert "tokens/s" in text and "TRL" not in text


@pytest.mark.slow
def test_the_peers_run_in_their_own_environment():
    command = ["make", "bench-peers", "BENCH=--small", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode and "Retrying (Retry(" in text:
        reason = text[-300:]
        pytest.skip(f"make bench-peers could not make its environment: {reason}")
    assert done.returncode == 0, text[-4000:]
    assert text.count("ratio") == 1 + 2, "of SFT; of fixed and skewed lengths"

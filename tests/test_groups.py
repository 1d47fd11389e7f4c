"""Tests marked xdist_group run on one worker, as `make test` starts them: a version of pytest or
pytest-xdist that ignores the mark says nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
from pathlib import Path

import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("number", range(6))
def test_one(number):
    Path(f"{number}.{os.environ['PYTEST_XDIST_WORKER']}").touch()
"""


def test_a_group_runs_on_one_worker(tmp_path: Path):
    (tmp_path / "test_group.py").write_text(TESTS)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [path.name.split(".") for path in tmp_path.glob("[0-9].gw*")]
    assert sorted(number for number, _ in ran) == list("012345")
    assert len({worker for _, worker in ran}) == 1

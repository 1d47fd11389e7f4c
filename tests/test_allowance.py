"""The rule of what a test may cost."""

import os
import re
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests import allowance
from tests.allowance import ALLOWANCE_S, WHOLE_PATH_S, allowance_s, cpu_ticks
from tests.whole_paths import WHOLE_PATHS

ROOT = Path(__file__).parent.parent
BURN = "import time\nwhile time.process_time() < 0.2: pass"


def test_a_child_counts():
    before = cpu_ticks()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = cpu_ticks()
    assert before is not None and after is not None
    assert after - before > 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_process_that_ends_meanwhile_hides_none_of_the_others(monkeypatch):
    """A reading that missed some would charge the next one's test with them."""
    ticks = Mock(side_effect=chain([OSError(), 7], repeat(OSError())))
    monkeypatch.setattr(allowance, "ticks_of", ticks)
    assert cpu_ticks() == 7 and cpu_ticks() is None


def test_whole_paths_are_few_and_there():
    assert len(WHOLE_PATHS) <= 40
    for nodeid in WHOLE_PATHS:
        where, _, name = nodeid.partition("::")
        function = re.escape(name.partition("[")[0].partition("::")[0])
        found = re.search(rf"^(def )?{function}\b", (ROOT / where).read_text(), re.MULTILINE)
        assert found, f"{nodeid}: no such test"


def test_allowances():
    def item(nodeid: str, slow: bool = False) -> Any:
        return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: slow or None)

    assert allowance_s(item("tests/test_allowance.py::x")) == ALLOWANCE_S
    assert allowance_s(item("tests/test_allowance.py::x", slow=True)) == float("inf")
    for nodeid in WHOLE_PATHS:
        assert allowance_s(item(nodeid)) == WHOLE_PATH_S


@pytest.mark.slow
def test_a_costly_test_fails(tmp_path: Path):
    text = "from tests import allowance\nallowance.ALLOWANCE_S = 0.04\n" + (
        "def test_it():\n    import time\n    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
    )
    (tmp_path / "test_costly.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.allowance", "-c", os.devnull]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "5 times its allowance of 0.04 s" in done.stdout
    assert "1 tests over their allowance" in done.stdout

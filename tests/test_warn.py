"""Warnings name the user's line."""

import threading
from pathlib import Path

import pytest

from nemorl import checks as module
from tests.forked import succeeded
from tests.runtime.runs import saved_model

PACKAGE = Path(module.__file__).parent


def test_all_warnings_are_made_by_it():
    found = [path.name for path in PACKAGE.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert found == []


def test_a_script_sees_its_own_line(forked: Path, tmp_path: Path):
    saved_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        """import nemorl
quiet = {"display": "none", "plots": False, "export": False}
nemorl.train(
    "model", [{"prompt": "1+1=", "response": "2"}] * 4, algorithm="sft", device="cpu",
    max_num_steps=1, max_total_sequence_length=1000, train_global_batch_size=4, run=quiet,
)
"""
    )
    said = succeeded(forked / "python", "mine.py", cwd=tmp_path).stderr
    assert "mine.py:3: UserWarning: data.max_total_sequence_length is lowered" in said


def test_a_thread_has_no_caller():
    """The warning comes all the same."""
    with pytest.warns(UserWarning, match="^text$"):
        thread = threading.Thread(target=module.warn, args=("text",))
        thread.start()
        thread.join()

from pathlib import Path

import pytest

from nemorl.runtime.store.directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """The folder of a run, without results."""
    return RunDirectory.create(tmp_path / "run", "max_num_steps: 7\n")

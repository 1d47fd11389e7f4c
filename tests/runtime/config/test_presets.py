"""The presets: what they say is what the config then holds."""

from pathlib import Path

import pytest

from nemorl import GRPOConfig
from nemorl.runtime.cli.main import parse
from nemorl.runtime.config.grpo import DESCRIPTIONS, PRESETS, preset

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_config(name: str):
    assert isinstance(preset(name), GRPOConfig)
    assert DESCRIPTIONS[name]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_files_of_configs(path: Path, monkeypatch):
    """The first line of each is the command that uses it."""
    monkeypatch.chdir(path.parents[1])
    _, prog, command, *rest = path.read_text().splitlines()[0].split()
    assert prog == "nemorl" and f"configs/{path.name}" in rest
    assert parse(command, rest).model.path == "PATH"

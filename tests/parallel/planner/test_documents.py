"""What the guide quotes of `nemorl plan`, against what it prints."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from nemorl.runtime.cli.main import main

GUIDE = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
BLOCKS = r"^```bash\n(nemorl plan .*?)\n```\n\n```text\n(.*?)^```"


@pytest.mark.parametrize(("command", "said"), re.findall(BLOCKS, GUIDE, re.M | re.S))
def test_the_guide_shows_what_the_command_prints(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, content in re.findall(r"^```json (\S+)\n(.*?)^```", GUIDE, re.M | re.S):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert main(shlex.split(command.replace("\\\n", ""))[1:]) == 0
    assert said in capsys.readouterr().out

"""What the guides quote of `nemorl plan`, against what it prints."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemorl.runtime.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "parallelism.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configurations that the guide writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, content in re.findall(r"^```json (\S+)\n(.*?)^```", GUIDE, re.M | re.S):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(json.loads(content)))
    return tmp_path


def printed(command: str, capsys: Any) -> str:
    assert main(shlex.split(command.replace("\\\n", ""))[1:]) == 0
    return capsys.readouterr().out


def test_the_page_about_scale_is_up_to_date():
    code = "import generate_scale as g; assert g.PAGE.read_text() == g.page(), g.page()"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)


def test_the_guides_table_is_what_the_command_prints(folder: Path, capsys: Any):
    blocks = r"^```bash\n(nemorl plan .*?)\n```\n\n```text\n(.*?)^```"
    ((command, table),) = re.findall(blocks, GUIDE, re.M | re.S)
    assert table in printed(command, capsys)

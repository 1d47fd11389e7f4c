"""What the guides quote of `nemorl plan`, against what it prints."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.command import estimate, find_plans
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import Step
from nemorl.runtime.cli.main import main
from tests.parallel.planner.test_memory import workload

DOCS = Path(__file__).parents[3] / "docs"
GUIDE, SCALE = ((DOCS / name).read_text() for name in ("parallelism.md", "scale.md"))


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


def degrees(words: str) -> dict[str, Any]:
    """The settings of a plan as the table has it: `tp 4, pp 8, selective`."""
    found: dict[str, Any] = {}
    for word in words.split(", "):
        name, _, value = word.partition(" ")
        found |= {name: int(value)} if value else {"activation_checkpointing": name}
    return found


ROWS = re.findall(r"^\| ((?:Llama|Qwen).*×.*) \|$", GUIDE, re.M)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (int(row.split(" | ")[1]) > 64)) for row in ROWS],
    ids=lambda row: " ".join(row.split(" | ")[:3]),
)
def test_published_plans_are_compared_as_estimated(row: str):
    """The table's own plan is the first one, and the published one takes what the table says."""
    model, gpus, tokens, theirs, _, ours, said = row.split(" | ")
    name, _, backend = model.partition(", ")
    config = workload(
        model__path=str(DOCS / "models-of-plans" / f"{name.lower()}.json"),
        gpus=int(gpus),
        seq_len=int(tokens),
        trainer__backend=backend or "megatron",
    )
    planned = find_plans(config)
    best = planned.fitting[0]
    assert best.plan == plan_of(ours, config)
    other = estimate(Step(planned.step.model, plan_of(theirs, config), config))
    took = f"{other.seconds / best.seconds:.2f}×, {other.fullest.total / 1e9:.1f} GB"
    assert took == said


def test_the_table_of_published_plans_is_found():
    assert len(ROWS) == 8


def plan_of(words: str, config: PlanConfig) -> ParallelPlan:
    return ParallelPlan(**degrees(words)).on(config.gpus).with_precision(accelerator=True)


def test_the_page_about_scale_is_up_to_date():
    code = "import generate_scale as g; assert g.PAGE.read_text() == g.page(), g.page()"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)


def test_moves_are_printed_as_on_the_page_about_scale(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setenv("COLUMNS", "80")
    ((command,),) = [re.findall(r"^```text\n(nemorl plan .*?)\n```", SCALE, re.M | re.S)]
    output = printed(command, capsys)
    table = SCALE.split("\n### ")[1].split("\n| ")[1:]
    header, *rows = [each.split("\n")[0].strip(" |").split(" | ") for each in table]
    printed_rows = [re.split(" {2,}", line) for line in output.splitlines()]
    cells = [" ".join(row).split() for row in printed_rows]
    for row in (header, *rows):
        assert " ".join(row).split() in cells
    assert len(rows) == 9 and "what a step" not in printed(command.removesuffix("--moves"), capsys)


def test_the_guides_table_is_what_the_command_prints(folder: Path, capsys: Any):
    blocks = r"^```bash\n(nemorl plan .*?)\n```\n\n```text\n(.*?)^```"
    ((command, table),) = re.findall(blocks, GUIDE, re.M | re.S)
    assert table in printed(command, capsys)

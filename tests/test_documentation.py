"""The documents' code runs, public functions show examples, the quickstart does what it says."""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import nemorl
from nemorl.runtime.cli.api import from_keywords
from nemorl.runtime.cli.commands import COMMANDS
from nemorl.runtime.cli.settings import EvalConfig
from nemorl.runtime.config.flags import NO_SETTINGS, names_of
from nemorl.runtime.run.registry import ALGORITHMS
from tests.documents import blocks
from tests.examples import LAST_LINE, load_example, write_example_files
from tests.forked import succeeded

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
)
GUIDES = [page for page in PAGES if page.startswith("docs/")]
FAST = "docs/data.md"
"""The guide that is run in `make test`; the others are run in `make test-all`."""


def public_functions(*packages: str) -> Iterator[tuple[str, object]]:
    for package in packages:
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                own = inspect.isfunction(value) and value.__module__ == info.name
                if own and not name.startswith("_"):
                    yield f"{info.name}.{name}", value


def test_every_public_function_has_a_docstring_those_of_the_core_an_example():
    core = dict(public_functions("nemorl.losses", "nemorl.data"))
    assert len(core) > 80
    assert not [name for name, one in core.items() if ">>>" not in (one.__doc__ or "")]
    others = public_functions("nemorl.rollout", "nemorl.parallel", "nemorl.runtime")
    assert not [name for name, one in others if not one.__doc__]


SHORT = ("--sft-steps", "8", "--grpo-steps", "2", "--num-held-out", "20", "--seed", "3")
QUICKSTART = pytest.mark.xdist_group("quickstart")


def quickstart(python: Path | str, folder: Path, *options: str) -> tuple[str, re.Match[str]]:
    script = ROOT / "examples" / "quickstart.py"
    done = succeeded(python, script, "--dir", folder, *options)
    last = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert last, done.stdout[-500:]
    return done.stdout, last


@pytest.fixture(scope="module")
def short_quickstart(tmp_path_factory) -> tuple[Path, str, re.Match[str]]:
    """The folder, output and last line of a quickstart in an interpreter of its own."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, *quickstart(sys.executable, folder, *SHORT)


def run_document(forked: Path, document: Path, folder: Path) -> str:
    """Run a document's blocks in a folder that has what it needs."""
    path = os.pathsep.join([str(forked), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [forked / "python", "-m", "tests.documents", document]
    variables = {"PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "150"}
    return succeeded(*command, cwd=folder, **variables).stdout


@pytest.mark.slow
@QUICKSTART
def test_the_readme_runs(forked: Path, short_quickstart, tmp_path: Path):
    write_example_files(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "runs" / "smollm2")
    shutil.copytree(short_quickstart[0], tmp_path / "runs" / "quickstart-0", dirs_exist_ok=True)
    assert "runs/grpo" in run_document(forked, ROOT / "README.md", tmp_path)


@pytest.mark.parametrize(
    "document",
    [page if page == FAST else pytest.param(page, marks=pytest.mark.slow) for page in GUIDES],
)
def test_the_guides_run(forked: Path, document: str, tmp_path: Path):
    write_example_files(tmp_path)
    path = ROOT / document
    for name in re.findall(r"nemorl data example (\S+)", path.read_text()):
        (tmp_path / name).unlink(missing_ok=True)  # the guide writes it itself
    run_document(forked, path, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_can_be_read(page: str):
    """Python, JSON and YAML parse, and the flags of commands are settings."""
    for block in blocks(ROOT / page):
        language = block.language if block.language != "text" else "bash"
        READERS[language](block.code)


def commands(code: str) -> None:
    """Compare the flags of each `nemorl` in a shell's block with the settings of its command."""
    for line in code.replace("\\\n", " ").splitlines():
        for called in NEMORL.split(line)[1:]:
            words = shlex.split(called, comments=True)
            name = next((one for one in (" ".join(words[:2]), words[0]) if one in SETTINGS), None)
            own = any("./" in word for word in words)  # a loss of one's own has settings
            for word in words if name else ():
                flag = word.partition("=")[0].replace("-", "_").removeprefix("__")
                if word[:2] == "--" and flag not in NO_SETTINGS and not (own and flag[:4] in OWN):
                    positive = re.sub(r"(^|\.)no_", r"\1", flag)
                    assert {flag, positive} & SETTINGS[name].keys(), (name, word)


NEMORL = re.compile(r"(?:^|\s)nemorl (?=[a-z])")
OWN = ("loss", "adva")
SETTINGS = {name: names_of(each.config) for name, each in {**ALGORITHMS, **COMMANDS}.items()}
READERS: dict[str, Any] = {
    "python": ast.parse,
    "json": json.loads,
    "jsonl": lambda code: [json.loads(line) for line in code.splitlines()],
    "yaml": yaml.safe_load,
    "bash": commands,
}


def test_the_reference_is_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
    migration = made["MIGRATION"].read_text()
    found = made["PAGE"].read_text(), migration
    assert found == (made["page"](), made["migration"](migration)), "run docs/generate_reference.py"


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module, with … for each value in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_troubleshooting_quotes_messages_that_there_are():
    rows = re.findall(
        r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    quoted = {q for row in rows for q in re.findall(r"`([^`]+)`", row)}
    assert len(quoted) > 15
    code = [path.read_text() for path in (ROOT / "nemorl").rglob("*.py")]
    said = {text for one in code for text in texts(ast.parse(one))}
    for quote in quoted:
        parts = [re.escape(part.strip()) for part in quote.split("…")]
        assert any(re.search(".*".join(parts), text, re.DOTALL) for text in said), quote


@pytest.mark.slow
@QUICKSTART
def test_a_short_quickstart(forked: Path, short_quickstart, tmp_path: Path):
    folder, output, last = short_quickstart
    assert last[3] == "3"
    assert (folder / "grpo" / "plots" / "overview.png").exists()
    for expected in (
        "Answers after supervised fine-tuning (the last digit comes first)",
        "Answers after reinforcement learning",
        "nemorl generate --model",
        "--run.resume",
    ):
        assert expected in output
    assert output.count("right") + output.count("wrong, it is") == 12
    again = quickstart(forked / "python", tmp_path, *SHORT)[1]
    assert again.groups()[:2] == last.groups()[:2]


def test_where_the_quickstart_uses_vllm_and_megatron(tmp_path: Path, monkeypatch):
    """With a run and answers that cost nothing; the real one is among the slow tests below."""
    seen: list[Any] = []
    result = SimpleNamespace(metrics={"val_accuracy": 0.5})
    monkeypatch.setattr(nemorl, "run", lambda config: seen.append(config) or result)

    def evaluate(model: Any, dataset: Any, **settings: Any) -> dict[str, Any]:
        seen.append(from_keywords(EvalConfig, "eval", settings))
        return {"answers": []}

    monkeypatch.setattr(nemorl, "evaluate", evaluate)
    example = load_example("quickstart")
    example.main(example.Quickstart(dir=tmp_path, engine="vllm", training="megatron"))
    used = [f"{type(one).__name__} {one.generation.backend}" for one in seen]
    assert used == ["SFTConfig torch", "EvalConfig vllm", "GRPOConfig vllm", "EvalConfig vllm"]
    assert all(one.generation.num_replicas == 1 for one in seen)
    assert [one.trainer.backend for one in seen[::2]] == ["megatron", "megatron"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--seed 0", "--seed 1", "--seed 2", "--engine vllm", "--training megatron"],
)
def test_the_quickstart_learns(tmp_path: Path, options: str):
    _, last = quickstart(sys.executable, tmp_path, *options.split())
    before, after = float(last[1]), float(last[2])
    assert before < 0.5
    assert after >= 0.95


@pytest.mark.parametrize("document", PAGES)
def test_documents_are_finished(document: str):
    """No placeholder is left, what they link to is there, and lines but those of tables fit."""
    text = (ROOT / document).read_text()
    assert "@@" not in text
    for link, anchor in re.findall(r"\]\(([^)#]*)(#[^)]+)?\)", text):
        if not link.startswith("http"):
            path = (ROOT / document).parent / link if link else ROOT / document
            assert path.exists(), link
            assert not anchor or path.suffix != ".md" or anchor[1:] in anchors(path), link + anchor
    rows = (line for line in text.splitlines() if "|" not in line)
    assert not [line for line in rows if len(line) > 100]


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_that_the_code_names_are_there():
    texts = [path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("[nbet]*/**/*.py")]]
    named = {name for text in texts for name in re.findall(r"docs/([a-z-]+\.md)", text)}
    assert len(named) > 5 and not {name for name in named if f"docs/{name}" not in PAGES}

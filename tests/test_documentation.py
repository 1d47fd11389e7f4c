"""Every code block of the README and of the guides runs, every public function shows an example,
and the quickstart does what it says.
"""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nemorl
from nemorl.runtime.cli.api import from_keywords
from nemorl.runtime.cli.settings import EvalConfig
from tests.examples import load_example
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parent.parent
GUIDES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
SLOW = {"cluster.md", "coming-from.md", "parallelism.md"}
"""Guides that start ranks or replicas."""
LAST_LINE = re.compile(
    r"held-out greedy accuracy: (\d\.\d\d) -> (\d\.\d\d) \(seed (\d+), (\d+) s of training\)"
)


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
    command = [python, str(ROOT / "examples" / "quickstart.py"), "--dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "150"}
    command = [forked / "python", "-m", "tests.documents", str(document)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@QUICKSTART
def test_the_readme_runs(forked: Path, short_quickstart, tmp_path: Path):
    folder = shutil.copytree(short_quickstart[0], tmp_path / "runs" / "quickstart-0")
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:300]))
    output = run_document(forked, ROOT / "README.md", tmp_path)
    assert "runs/grpo" in output


@pytest.mark.parametrize(
    "document", [g if g not in SLOW else pytest.param(g, marks=pytest.mark.slow) for g in GUIDES]
)
def test_the_guides_run(forked: Path, document: str, tmp_path: Path):
    write_example_files(tmp_path)
    path = ROOT / "docs" / document
    for name in re.findall(r"nemorl data example (\S+)", path.read_text()):
        (tmp_path / name).unlink(missing_ok=True)  # the guide writes it itself
    run_document(forked, path, tmp_path)


def test_the_reference_is_up_to_date():
    code = (
        "import generate_reference as g; assert g.PAGE.read_text() == g.page(); text ="
        " g.MIGRATION.read_text(); assert text == g.migration(text)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", check=False)
    assert done.returncode == 0, "run: python docs/generate_reference.py"


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


def write_example_files(folder: Path) -> None:
    """What stands in the guides for a model and data of one's own, and for the quickstart's."""
    tiny_model(scale=2.0, max_position_embeddings=4096).save_pretrained(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder / "model")
    for name in ("model", "sft"):
        shutil.copytree(folder / "model", folder / "runs" / "quickstart-0" / name)
    sums = [(f"{i % 7}+{i % 5}=", str(i % 7 + i % 5)) for i in range(40)]
    rows = {
        "demonstrations": [{"prompt": p, "response": a} for p, a in sums],
        "questions": [{"prompt": p, "answer": a} for p, a in sums],
        "pairs": [{"prompt": p, "chosen": a, "rejected": str(int(a) + 1)} for p, a in sums],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


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


@pytest.mark.parametrize(
    "document",
    [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]],
)
def test_documents_are_finished(document: str):
    """No placeholder is left, what they link to is there, and lines but those of tables fit."""
    text = (ROOT / document).read_text()
    assert "@@" not in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / document).parent.joinpath(link).exists(), link
    rows = (line for line in text.splitlines() if not line.lstrip().startswith("|"))
    assert not [line for line in rows if len(line) > 100]

"""What an import costs and needs, each in a fresh interpreter."""

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, succeeded

ENGINES = ("ray", "vllm")
OF_RAY = tuple(f"nemorl.runtime.{room}." for room in ("workers", "engines", "ranks"))
"""The rooms whose modules may need Ray or vLLM to be imported."""
BLOCKED = (
    *ENGINES,
    "torchtitan",
    "megatron",
    "transformers",
    "datasets",
    "numpy.testing",
    "tyro",
    "rich",
    "pydantic",
    "matplotlib",
)


def blocker(*blocked: str) -> str:
    """Code after which these packages can't be imported."""
    return f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {blocked}):
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocker())
"""


def _python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return succeeded(sys.executable, *options, "-c", code, timeout=300)


@pytest.mark.slow
def test_losses_import_without_the_big_dependencies():
    names = sorted(path.stem for path in (ROOT / "nemorl" / "losses").glob("[a-z]*.py"))
    imports = "\n".join(f"import nemorl.losses.{name}" for name in names)
    unloaded = f"for name in {BLOCKED}: assert name not in sys.modules, name"
    _python(f"{blocker(*BLOCKED)}\n{imports}\n{unloaded}")


@pytest.mark.slow
def test_the_runtime_imports_without_engines():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "nemorl").rglob("*.py")
        if path.stem[:2] != "__"
    }
    code = f"""
import importlib
for module in {sorted(modules)}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert module.startswith({OF_RAY}) and "is blocked" in str(error), module
for name in {ENGINES}: assert name not in sys.modules, name
"""
    _python(blocker(*ENGINES) + code)


def test_importing_nemorl_does_not_import_torch():
    _python(
        "import sys, nemorl; heavy = {'torch', 'numpy', 'transformers', 'jaxtyping'} &"
        " set(sys.modules); assert not heavy, heavy"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with samples, a tokenizer and a model."""
    from tests.runtime.runs import grpo_config, start

    folder = tmp_path_factory.mktemp("runs") / "sums"
    start(grpo_config(folder, steps=2, run={"export": True}))
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 3)
    return folder


WITHOUT_TORCH = {
    "report {run} {run}/../sums2": "written to",
    "data inspect --data.train {run}/rows.jsonl --model.tokenizer {run}/tokenizer": "trained on",
    "grpo --data.train {run}/rows.jsonl": "model.path",
    "grpo --model.path {run} --data.train {run}/rows.jsonl --reward nope": "reward must be one of",
    "sft --model.path {run} --data.train d --trainer.backend nope": "unknown training backend",
    "eval --model {run}/none --validation {run}/rows.jsonl": "error: model.path must be a folder",
    "grpo --model.path {run}/hf --data.train {run}/broken.jsonl": "broken.jsonl, line 4: not JSON",
    "export --run {run}/nothing --output {run}/out": "error: run must be the folder of a run",
}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (number % 4 > 0))
        for number, each in enumerate(WITHOUT_TORCH)
    ],
)
def test_what_needs_no_tensor_does_not_import_torch(run: Path, command: str):
    (run / "broken.jsonl").write_text((run / "rows.jsonl").read_text() + '{"prompt": "1+1="')
    if not (run.parent / "sums2").exists():
        shutil.copytree(run, run.parent / "sums2")
    args = command.format(run=run).split()
    found = _python(
        f"import sys; sys.argv = ['nemorl', *{args!r}]\n"
        "from nemorl.runtime.cli.main import main\n"
        "main(); assert sys.modules.get('torch') is None, 'torch was imported'"
    )
    assert WITHOUT_TORCH[command] in found.stdout + found.stderr


def test_importing_nemorl_is_fast():
    assert statistics.median(_import_seconds() for _ in range(5)) < 0.2


def _import_seconds() -> float:
    times = _python("import nemorl", "-X", "importtime").stderr
    return int(re.search(r"(\d+) \| nemorl$", times, re.MULTILINE)[1]) / 1e6

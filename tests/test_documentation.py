"""The README's Python runs, every public function shows an example, and the quickstart does what it says."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemorl

ROOT = Path(__file__).parent.parent
LAST_LINE = re.compile(r"held-out greedy accuracy: (\d\.\d\d) -> (\d\.\d\d) \(seed (\d+), (\d+) s of training\)")


def public_functions(*packages: str) -> Iterator[tuple[str, object]]:
    for package in packages:
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == info.name:
                    yield f"{info.name}.{name}", value


def test_every_public_function_of_the_core_has_an_example():
    functions = dict(public_functions("nemorl.losses", "nemorl.data"))
    assert len(functions) > 80
    assert not [name for name, function in functions.items() if ">>>" not in (function.__doc__ or "")]


def test_every_public_function_says_what_it_does():
    functions = dict(public_functions("nemorl.losses", "nemorl.data", "nemorl.rollout", "nemorl.parallel", "nemorl.runtime"))
    undocumented = {name for name, function in functions.items() if not function.__doc__}
    assert undocumented <= {
        f"nemorl.runtime.algorithms.grpo.{name}" for name in ("loss_weights", "policy_term", "needs_kl_reward", "rollout_metrics", "timing")
    } | {
        "nemorl.runtime.algorithms.sft.loss_fn",
        "nemorl.runtime.algorithms.sft.with_loss_weights",
    }


def test_the_readmes_python_runs(tmp_path: Path):
    """All blocks of one document in one program, in a folder where the quickstart has left its model."""
    sys.path.insert(0, str(ROOT / "examples"))
    from quickstart import save_model, save_tokenizer

    folder = tmp_path / "runs" / "quickstart-0" / "model"
    save_model(folder, save_tokenizer(folder), seed=0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "runs/mine" in done.stdout


def quickstart(folder: Path, *options: str) -> tuple[str, re.Match[str]]:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert last, done.stdout[-500:]
    return done.stdout, last


def test_a_short_quickstart(tmp_path: Path):
    short = ("--sft-steps", "20", "--grpo-steps", "2", "--num-held-out", "50", "--seed", "3")
    output, last = quickstart(tmp_path, *short)
    assert last[3] == "3"
    assert (tmp_path / "grpo" / "plots" / "overview.png").exists()
    for expected in (
        "Answers after supervised fine-tuning (the last digit comes first)",
        "Answers after reinforcement learning",
        "nemorl generate --model",
        "--run.resume",
    ):
        assert expected in output
    assert output.count("right") + output.count("wrong, it is") == 12
    again = quickstart(tmp_path, *short)[1]
    assert again[1] == last[1]
    assert again[2] == last[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int):
    _, last = quickstart(tmp_path, "--seed", str(seed))
    before, after = float(last[1]), float(last[2])
    assert before < 0.5
    assert after >= 0.95


@pytest.mark.parametrize("document", [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]])
def test_documents_are_finished(document: str):
    """No placeholder is left, and what they link to is there."""
    text = (ROOT / document).read_text()
    assert "@@" not in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / document).parent.joinpath(link).exists(), link


def test_the_public_names_are_there():
    for name in nemorl.__all__:
        assert getattr(nemorl, name) is not None

"""What an import costs and needs, each in a fresh interpreter: the losses need torch alone, and
`import nemorl` not even that.
"""

import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGINES = ("ray", "vllm")
OF_RAY = tuple(f"nemorl.runtime.{room}." for room in ("cluster", "engines", "ranks"))
"""The rooms whose modules may need Ray or vLLM to be imported: only runs that use these do."""
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
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_losses_import_without_the_big_dependencies():
    names = sorted(
        f"nemorl.losses.{path.stem}"
        for path in (ROOT / "nemorl" / "losses").glob("*.py")
        if path.stem != "__init__"
    )
    imports = "\n".join(f"import {name}" for name in ("nemorl.losses", *names))
    _python(
        f"{blocker(*BLOCKED)}\n{imports}\nfor name in {BLOCKED}: assert name not in sys.modules,"
        " name"
    )


def test_the_blocker_blocks():
    """So that the test above can't pass for nothing."""
    code = (
        "try:\n    import ray\nexcept ModuleNotFoundError as error:\n    assert 'blocked' in"
        " str(error)\nelse:\n    raise AssertionError"
    )
    _python(f"{blocker(*BLOCKED)}\n{code}")


def test_the_runtime_imports_without_engines():
    """Ray and vLLM take seconds to import and are not on every machine: they are imported where a
    run uses them.
    """
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


def test_importing_nemorl_is_fast():
    """Under 0.2 s: the sum of what `-X importtime` reports for the package itself, the middle of
    five runs, interpreter start not counted.
    """
    assert statistics.median(_import_seconds() for _ in range(5)) < 0.2


def _import_seconds() -> float:
    lines = _python("import nemorl", "-X", "importtime").stderr.splitlines()
    cumulative = next(
        line.split("|")[1] for line in lines if line.rpartition("|")[2].strip() == "nemorl"
    )
    return int(cumulative) / 1e6

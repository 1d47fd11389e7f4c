"""DESIGN §1 as a test: imports point down only, each dependency has its room, files and functions stay short."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nemorl"

FLOORS = {"checks": 0, "losses": 1, "data": 2, "rollout": 3, "parallel": 4, "runtime": 5}
ATTIC = 6
"""Modules directly in nemorl/ may look down on everything, and nobody may import them; but checks.py is the ground."""

LOSSES_MAY_IMPORT = {"torch", "jaxtyping", "einops", "nemorl"}
ONLY_IN = {"ray": ("runtime",), "vllm": ("runtime",), "torchtitan": ("parallel/dtensor",), "megatron": ("parallel/megatron",)}
ONLY_ONE_FILE = ("torchtitan",)

MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 80
LONG: dict[str, str] = {"runtime/import_rules.py": "one table of another library's keys"}
"""`"runtime/config.py"` or `"runtime/config.py:function"` -> the reason why it is longer than the limit."""


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names, with its line: at the top, inside functions, under TYPE_CHECKING, relative, and `import_module("...")`."""
    package = [root.name, *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from nemorl import losses` names a room, `from nemorl.losses import clipped` a function
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value


def broken_floors(root: Path) -> list[str]:
    """Every import below `root` that the floors forbid, in words."""
    problems = []
    users: dict[str, set[str]] = {name: set() for name in ONLY_ONE_FILE}
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root).as_posix()
        room = where.split("/")[0].removesuffix(".py")
        floor = FLOORS.get(room, ATTIC)
        if "/" in where and room not in FLOORS:
            problems.append(f"{where}: the room {room!r} has no floor; add it to FLOORS")
        for line, module in imports(path, root):
            top, *rest = module.split(".")
            if top == root.name:
                target = FLOORS.get(rest[0], ATTIC) if rest else ATTIC
                if target > floor:
                    problems.append(f"{where}:{line}: {module} is on a higher floor")
            if room == "losses" and top not in LOSSES_MAY_IMPORT and top not in sys.stdlib_module_names:
                problems.append(f"{where}:{line}: losses may not import {top}")
            if top in ONLY_IN and not where.startswith(tuple(place + "/" for place in ONLY_IN[top])):
                problems.append(f"{where}:{line}: {top} belongs in {' or '.join(ONLY_IN[top])}")
            if top in users:
                users[top].add(where)
    problems += [f"{name} is imported in {sorted(files)}; one file is enough" for name, files in users.items() if len(files) > 1]
    return problems


def too_long(root: Path) -> dict[str, int]:
    """Files and functions over the limits, with their length."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        where, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            found[where] = count
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count - _docstring_lines(node) > MAX_FUNCTION_LINES:
                    found[f"{where}:{node.name}"] = count
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A docstring with formula, sources and examples is not what makes a function long."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0


def test_imports_point_down():
    assert broken_floors(PACKAGE) == []


def test_files_and_functions_are_short():
    found = too_long(PACKAGE)
    assert {name: count for name, count in found.items() if name not in LONG} == {}
    assert [name for name in LONG if name not in found] == [], "no longer long: take it off the table"


BAD_FILES = {
    "upwards": ("losses/a.py", "from nemorl.data.batch import TokenBatch", "higher floor"),
    "upwards in a function": ("data/a.py", "def f():\n    import nemorl.runtime.cli", "higher floor"),
    "upwards for types": (
        "rollout/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nemorl.parallel import plan",
        "higher floor",
    ),
    "upwards relative": ("losses/deep/a.py", "from ...data import batch", "higher floor"),
    "upwards by name": ("data/a.py", "from nemorl import rollout", "higher floor"),
    "the facade": ("parallel/a.py", "from nemorl import train", "higher floor"),
    "by string": ("losses/a.py", "import importlib\nimportlib.import_module('nemorl.data')", "higher floor"),
    "foreign in losses": ("losses/a.py", "import numpy as np", "losses may not import numpy"),
    "ray low down": ("parallel/a.py", "def f():\n    import ray.util", "ray belongs in runtime"),
    "vllm low down": ("rollout/a.py", "from vllm import LLM", "vllm belongs in runtime"),
    "megatron elsewhere": ("runtime/a.py", "from megatron.core import parallel_state", "megatron belongs in parallel/megatron"),
    "torchtitan elsewhere": ("parallel/a.py", "import torchtitan", "torchtitan belongs in parallel/dtensor"),
    "up from the ground": ("checks.py", "from nemorl.losses import types", "higher floor"),
    "a new room": ("attic/a.py", "", "has no floor"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_forbidden_import_is_found(name: str, tmp_path: Path):
    where, text, message = BAD_FILES[name]
    root = _tree(tmp_path, {where: text})
    problems = broken_floors(root)
    assert len(problems) == 1 and message in problems[0] and problems[0].startswith(where)


def test_torchtitan_in_two_files_is_found(tmp_path: Path):
    root = _tree(tmp_path, {"parallel/dtensor/a.py": "import torchtitan", "parallel/dtensor/b.py": "from torchtitan.distributed import utils"})
    assert broken_floors(root) == ["torchtitan is imported in ['parallel/dtensor/a.py', 'parallel/dtensor/b.py']; one file is enough"]


def test_what_is_allowed_passes(tmp_path: Path):
    files = {
        "losses/a.py": "import math\nimport torch\nfrom jaxtyping import Float\nfrom nemorl.losses import b\nfrom . import b",
        "data/a.py": "import numpy\nfrom nemorl import losses\nfrom ..losses import a",
        "parallel/dtensor/a.py": "import torchtitan",
        "runtime/a.py": "import ray\nfrom vllm import LLM\nfrom nemorl.parallel.dtensor import a",
        "cli.py": "from nemorl.runtime import a",
    }
    assert broken_floors(_tree(tmp_path, files)) == []


def test_long_files_and_functions_are_found(tmp_path: Path):
    body = "\n".join(f"    x{i} = {i}" for i in range(MAX_FUNCTION_LINES))
    documented = 'def g():\n    """' + "words\n" * MAX_FUNCTION_LINES + '"""\n    return 1'
    root = _tree(tmp_path, {"losses/a.py": f"def f():\n{body}\n", "losses/b.py": "x = 1\n" * (MAX_FILE_LINES + 1), "losses/c.py": documented})
    assert set(too_long(root)) == {"losses/a.py:f", "losses/b.py"}


def _tree(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "nemorl"
    for where, text in files.items():
        (root / where).parent.mkdir(parents=True, exist_ok=True)
        (root / where).write_text(text, encoding="utf-8")
    return root

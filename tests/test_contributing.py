"""What CONTRIBUTING.md says of the skipped tests and of the code's length."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import succeeded

TESTS = Path(__file__).parent
GUIDE = " ".join((TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
SKIPS = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip"}
ABSENT = re.compile("gpu|vllm|mcp|bitsandbytes|megatron|could not", re.IGNORECASE)
"""What a test may be skipped for, apart from being for a GPU: not in what `make install` makes."""


def gpu_tests(tree: ast.Module) -> Iterator[int]:
    """Yield of each test that is marked gpu, itself or by `accelerator`, how many it is."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(each) for each in node.decorator_list]
            if "pytest.mark.gpu" in marks or "accelerator" in {x.arg for x in node.args.args}:
                given = [each for each in node.decorator_list if isinstance(each, ast.Call)]
                yield len(ast.literal_eval(given[0].args[1])) if given else 1


def test_each_skipped_test_has_a_reason():
    trees = [ast.parse(path.read_bytes()) for path in TESTS.rglob("*.py")]
    assert f"{sum(n for tree in trees for n in gpu_tests(tree))} tests are skipped" in GUIDE
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    skips = [ast.unparse(call) for call in calls if ast.unparse(call.func) in SKIPS]
    assert skips and not [skip for skip in skips if not ABSENT.search(skip)]


@pytest.mark.slow
def test_the_path_of_a_reward_is_as_long_as_said():
    script = TESTS.parent / "benchmarks" / "reward_path.py"
    done = succeeded(sys.executable, script)
    lines, files = map(int, re.findall(r"(\d+) lines in (\d+) files", done.stdout)[-1])
    assert f"{round(lines, -2):,} lines in {files} files" in GUIDE

"""The list of skipped tests in CONTRIBUTING.md is complete."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ELSEWHERE = {
    "conftest.py": 3,  # no GPU; no vLLM; a GPU, beside which none is emulated
    "test_install.py": 1,  # no vLLM
    "runtime/start/test_devices.py": 1,  # no vLLM
    "test_benchmarks.py": 2,  # no vLLM; no network for the peers' environment
    "test_demo.py": 1,  # no network for the demo's packages
    "parallel/test_named_optimizers.py": 7,  # no bitsandbytes
    "parallel/planner/test_memory.py": 1,  # no bitsandbytes
    "parallel/test_qlora.py": 1,  # no bitsandbytes
    "runtime/engines/test_adapters.py": 1,  # no bitsandbytes
    "parallel/parity/test_parity.py": 1,  # no megatron-core
    "rollout/environments/test_openenv.py": 1,  # no vLLM, which brings what its server needs
    "runtime/engines/test_weights.py": 1,  # one GPU where two are needed
    "runtime/ranks/test_ranked_runs.py": 1,  # fewer GPUs than its ranks and engines need
}
"""Other places that skip, none of them in the environment that `make install` makes."""


def gpu_tests(tree: ast.Module) -> Iterator[int]:
    """Yield of each test that is marked gpu, itself or by `accelerator`, how many it is with its
    parameters.
    """
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(each) for each in node.decorator_list]
            if "pytest.mark.gpu" in marks or "accelerator" in {x.arg for x in node.args.args}:
                given = [each for each in node.decorator_list if isinstance(each, ast.Call)]
                yield len(ast.literal_eval(given[0].args[1])) if given else 1


def skips(tree: ast.Module) -> int:
    """Return at how many places a file skips a test."""
    names = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip"}
    calls = [ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return sum(call in names for call in calls)


def test_each_skipped_test_is_listed():
    text = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = {name: int(count) for name, count in re.findall(r"\| `(\S+\.py)` \| (\d+) \|", text)}
    marked, skipping = Counter[str](), Counter[str]()
    for path in TESTS.rglob("*.py"):
        tree, name = ast.parse(path.read_bytes()), path.relative_to(TESTS).as_posix()
        marked[name] += sum(gpu_tests(tree))
        skipping[name] += skips(tree)
    assert rows == +marked
    assert f"{marked.total()} tests are skipped" in text
    assert +skipping == ELSEWHERE

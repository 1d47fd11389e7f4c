"""The house as a test: imports point down, none in a circle, each dependency in its room."""

import ast
import graphlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.runtime.run.registry import GENERATION_BACKENDS, TRAINING_BACKENDS

PACKAGE = Path(__file__).parent.parent / "nemorl"

FLOORS = {
    "accelerator": 0,
    "checks": 0,
    "openmp": 0,
    "overlapping": 0,
    "losses": 1,
    "data": 2,
    "models": 3,
    "rollout": 4,
    "parallel": 5,
    "runtime": 6,
}
ATTIC = 7
"""Modules directly in nemorl/ may import everything below, and nobody may import them."""
ROOMS = (
    *("config", "store", "workers", "engines", "ranks"),
    *("watch", "serve", "run", "algorithms", "cli"),
)
"""The rooms of runtime, bottom up. Each imports only itself and those before it."""

LOSSES_MAY_IMPORT = {"torch", "jaxtyping", "einops", "nemorl"}
ONLY_IN = {
    "ray": "runtime/",
    "vllm": "runtime/",
    "torchtitan": "parallel/dtensor/",
    "megatron": "parallel/megatron/",
}
ONLY_ONE_FILE = ("torchtitan", "megatron")

BOUNDS = {
    "words": 225_010,
    "words of runtime": 101_180,
    "files": 209,
    "imports among files": 1_188,
    "lines of a class": 250,
    "lines of a function": 75,
    "files directly in runtime": 1,
    "longest line": 100,
    "words of tests": 213_800,
    "words of docs": 38_100,
    "pages of docs": 24,
    "words of README": 900,
    "words of CHANGELOG": 600,
}
"""What the project may weigh. These numbers may only fall, but for what a wing brings: contracts
4,000 words, loops 5,000, endpoint 4,500 (it brought 8,500, of which deletions paid 2,400), Tinker
4,000 (it brought 9,900, of which nothing is paid yet).
"""
BACKENDS = {"dtensor", "megatron", "torch", "vllm"}
PUBLIC = """
AsyncConfig BackendConfig BaseConfig Bundle CISPOLoss Callback ClippedLoss Completion ContextFull
Conversation ConversationFailed CriticConfig DPOConfig DPOLoss DPOTrainer DataConfig DataModule
DistillConfig DistillTrainer EnvironmentInterface EnvironmentReturn Episode Failure
FunctionalRewardWrapper GAEAdvantage GMPOLoss GRPOConfig GRPOTrainer GSPOLoss GapConfig
GenerationBackend GenerationConfig GroupAdvantage HingeLoss IPOLoss Judge KLConfig KTOLoss
LoRAConfig LoggedRun MetricLogger ModelConfig Needs ORPOLoss OffPolicyConfig OptimSettings
OptimizerConfig Outcome OverlongConfig PPOConfig PPOTrainer ParallelPlan PassAtKAdvantage Policy
ProfileConfig RMConfig RayVirtualCluster RayWorkerGroup ReceiptsConfig ReinforceLoss
ReinforcePlusPlusAdvantage RewardServer RolloutConfig Run RunConfig RunView RuntimeConfig SAPOLoss
SFTConfig SFTTrainer SampledTokens SamplingParams Scores SimPOLoss Step StopTraining TeacherConfig
TokenBatch TopTokens TrainResult TrainerConfig TrainingBackend Turn TurnResult __version__ agent
at_version cli connect data evaluate export generate get_algorithm get_generation_backend
get_training_backend judged_in_processes load_config losses main needs open_run openenv policy_loss
preset prove register_advantage register_algorithm register_generation_backend register_logger
register_loss register_reward register_training_backend run sync_weights train write_report
"""


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names, wherever and however, with its line."""
    package = [root.name, *path.relative_to(root).parent.parts]
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = [
                    *package[: len(package) - level + 1 if level else 0],
                    *filter(None, [module]),
                ]
                for alias in names:  # a module, or a function of `module`
                    yield node.lineno, ".".join([*parts, alias.name])
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def modules(root: Path) -> dict[str, Path]:
    """The files below `root` by the names of their modules."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def broken_floors(root: Path) -> list[str]:
    """Every import that the floors and the order of the rooms forbid, in words."""
    problems = []
    users: dict[str, set[str]] = {name: set() for name in ONLY_ONE_FILE}
    for name, path in modules(root).items():
        where, room = path.relative_to(root).as_posix(), f"{name}.".split(".")[1]
        if "/" in where and room not in FLOORS:
            problems.append(f"{where}: the room {room!r} has no floor; add it to FLOORS")
        if where.count("/") == 1 and room == "runtime" and path.name != "__init__.py":
            problems.append(f"{where}: runtime has rooms; put it into one of them")
        for line, module in imports(path, root):
            top, *rest = module.split(".")
            if top == root.name and FLOORS.get((rest or [""])[0], ATTIC) > FLOORS.get(room, ATTIC):
                problems.append(f"{where}:{line}: {module} is on a higher floor")
            allowed = LOSSES_MAY_IMPORT | sys.stdlib_module_names
            if room == "losses" and top not in allowed:
                problems.append(f"{where}:{line}: losses may not import {top}")
            if not where.startswith(ONLY_IN.get(top, "")):
                problems.append(f"{where}:{line}: {top} belongs in {ONLY_IN[top]}")
            if top in users:
                users[top].add(where)
            if where.startswith("runtime/") and rest[:1] == ["runtime"] and len(rest) > 1:
                ours, theirs = where.split("/")[1], rest[1]
                if unknown := [each for each in (ours, theirs) if each not in ROOMS]:
                    problems.append(f"{where}:{line}: runtime has no room {unknown[0]!r}")
                elif ROOMS.index(theirs) > ROOMS.index(ours):
                    problems.append(f"{where}:{line}: {module} is in a higher room")
    problems += [
        f"{name} is imported in {sorted(files)}; one file is enough"
        for name, files in users.items()
        if len(files) > 1
    ]
    return problems


def graph_of(root: Path) -> dict[str, set[str]]:
    """The modules that each one imports, packages aside."""
    found = modules(root)
    packages = {name for name, path in found.items() if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {name: set() for name in found.keys() - packages}
    for name in graph:
        for _, target in imports(found[name], root):
            target = target if target in found else target.rpartition(".")[0]
            graph[name] |= {target} & graph.keys() - {name}
    return graph


def circle(root: Path) -> list[str]:
    """The modules of a circle of imports, if there is one."""
    try:
        graphlib.TopologicalSorter(graph_of(root)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def nodes(root: Path, *kinds: type) -> Iterator[tuple[str, Any]]:
    """The nodes of some kinds in all files, each with the file."""
    for path in modules(root).values():
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield path.relative_to(root).as_posix(), node


def longest(root: Path, *kinds: type) -> int:
    """The lines of the longest class or function, with its docstring."""
    return max((node.end_lineno - node.lineno + 1 for _, node in nodes(root, *kinds)), default=0)


def untyped(root: Path) -> list[str]:
    """What is called run, config or trainer and typed Any, which hides what imports what."""
    found = []
    for where, node in nodes(root, ast.arg, ast.AnnAssign):
        name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).split(".")[-1]
        hint = node.annotation and ast.unparse(node.annotation)
        if name.strip("_") in ("run", "config", "trainer") and hint == "Any":
            found.append(f"{where}:{node.lineno}")
    return found


def defined_twice(root: Path) -> list[str]:
    """The names of public classes of which there are several."""
    names = Counter(
        node.name
        for path in modules(root).values()
        for node in parsed(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return [name for name, count in names.items() if count > 1]


def compared_backends(root: Path) -> list[str]:
    """Every comparison with a backend's name, in place of which there are traits and checks."""
    found = []
    for path in modules(root).values():
        where = path.relative_to(root).as_posix()
        if not where.startswith(("runtime/", "parallel/planner/", "parallel/plan.py")):
            continue
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.MatchValue):
                names = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                if names & BACKENDS:
                    found.append(f"{where}:{node.lineno}")
    return found


def test_imports_point_down():
    assert broken_floors(PACKAGE) == []


def test_no_imports_run_in_a_circle():
    assert circle(PACKAGE) == []


def test_the_project_stays_small():
    root = PACKAGE.parent
    library, runtime, tests, docs = (
        [path.read_text(encoding="utf-8") for path in sorted(files)]
        for files in (
            PACKAGE.rglob("*.py"),
            (PACKAGE / "runtime").rglob("*.py"),
            (root / "tests").rglob("*.py"),
            (root / "docs").glob("*.md"),
        )
    )

    def words(texts: list[str]) -> int:
        return sum(len(text.split()) for text in texts)

    found = {
        "words": words(library),
        "words of runtime": words(runtime),
        "files": len(library),
        "imports among files": sum(map(len, graph_of(PACKAGE).values())),
        "lines of a class": longest(PACKAGE, ast.ClassDef),
        "lines of a function": longest(PACKAGE, ast.FunctionDef, ast.AsyncFunctionDef),
        "files directly in runtime": len([*(PACKAGE / "runtime").glob("*.py")]),
        "longest line": max(len(line) for text in library for line in text.splitlines()),
        "words of tests": words(tests),
        "words of docs": words(docs),
        "pages of docs": len(docs),
        "words of README": words([(root / "README.md").read_text(encoding="utf-8")]),
        "words of CHANGELOG": words([(root / "CHANGELOG.md").read_text(encoding="utf-8")]),
    }
    over = {name: (size, BOUNDS[name]) for name, size in found.items() if size > BOUNDS[name]}
    assert over == {}


def test_a_run_a_config_and_a_trainer_have_types():
    assert untyped(PACKAGE / "runtime") == []


def test_a_name_means_one_class():
    assert defined_twice(PACKAGE) == []


def test_no_backend_is_compared_by_its_name():
    places = {**TRAINING_BACKENDS, **GENERATION_BACKENDS}.items()
    assert {name for name, place in places if isinstance(place, str)} == BACKENDS
    assert compared_backends(PACKAGE) == []


def test_public_names():
    """A name is added or taken away on purpose only."""
    assert sorted(nemorl.__all__) == PUBLIC.split()
    assert all(getattr(nemorl, name) is not None for name in nemorl.__all__)


TYPES = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nemorl.parallel import plan
"""


@pytest.mark.parametrize(
    ("where", "text", "message"),
    [
        ("losses/a.py", "from nemorl.data.batch import TokenBatch", "higher floor"),
        ("rollout/a.py", TYPES, "higher floor"),
        ("data/a.py", "from nemorl import rollout", "higher floor"),
        ("losses/a.py", "import importlib\nimportlib.import_module('nemorl.data')", "higher floor"),
        ("losses/a.py", "import numpy as np", "losses may not import numpy"),
        ("rollout/a.py", "from vllm import LLM", "vllm belongs in runtime"),
        (
            "runtime/cli/a.py",
            "from megatron.core import a",
            "megatron belongs in parallel/megatron",
        ),
        ("attic/a.py", "", "has no floor"),
        ("runtime/a.py", "", "runtime has rooms"),
        ("runtime/attic/a.py", "import nemorl.runtime.run.a", "no room 'attic'"),
        ("runtime/config/a.py", "def f():\n    from nemorl.runtime.run import a", "higher room"),
    ],
)
def test_a_forbidden_import_is_found(where: str, text: str, message: str, tmp_path: Path):
    problems = broken_floors(_tree(tmp_path, {where: text}))
    assert len(problems) == 1 and message in problems[0] and problems[0].startswith(where)


def test_a_circle_is_found(tmp_path: Path):
    files = {"data/a.py": "from nemorl.data import b", "data/b.py": "from nemorl.data.c import x"}
    assert circle(_tree(tmp_path, files | {"data/c.py": "x = 1"})) == []
    root = _tree(tmp_path, {"data/c.py": "def f():\n    from .a import y"})
    assert set(circle(root)) == {"nemorl.data.a", "nemorl.data.b", "nemorl.data.c"}


def test_length_missing_types_and_doubled_names_are_found(tmp_path: Path):
    one = "class A:\n    def f(self, run: Any):\n        return run\n"
    root = _tree(tmp_path, {"losses/a.py": one, "data/a.py": "class A:\n    _config: Any = 1\n"})
    assert longest(root, ast.ClassDef) == 3 and longest(root, ast.FunctionDef) == 2
    assert sorted(untyped(root)) == ["data/a.py:2", "losses/a.py:2"]
    assert defined_twice(root) == ["A"]


@pytest.mark.parametrize(
    "line",
    [
        'if config.backend in ("vllm", "mine"): pass',
        'match name:\n    case "dtensor": pass',
    ],
)
def test_a_compared_backend_is_found(line: str, tmp_path: Path):
    files = {"runtime/run/a.py": line, "parallel/a.py": line}
    assert compared_backends(_tree(tmp_path, files))[0].startswith("runtime/run/a.py:")


def _tree(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "nemorl"
    for where, text in files.items():
        (root / where).parent.mkdir(parents=True, exist_ok=True)
        (root / where).write_text(text, encoding="utf-8")
    return root

"""Loads the peers' own files, unchanged, from their installed wheels.

TRL is imported as it is. verl and OpenRLHF are installed without their requirements (vLLM, Ray,
DeepSpeed): their packages' `__init__` files don't run, and those requirements are stubs, on which
no number depends. Methods of trainers run with a stub in place of the trainer (`trainer`); of a
method that also generates text, only the statements that compute weights run (`statements`).
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections import defaultdict
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution, distributions, version
from importlib.util import find_spec
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

NAMES = ("trl", "verl", "openrlhf")
BARE = (
    "verl",
    "openrlhf",
    "openrlhf.datasets",
    "openrlhf.models",
    "openrlhf.trainer",
    "openrlhf.trainer.ppo_utils",
    "openrlhf.trainer.ray",
    "openrlhf.utils",
    "verl.utils.dataset",
)
STUBS = (
    "codetiming",
    "deepspeed",
    "orjson",
    "ray",
    "openrlhf.trainer.ppo_utils.experience",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.utils.seqlen_balancing",
)


@cache
def installed() -> dict[str, str]:
    """Return the version of each peer that is installed."""
    return {name: version(name) for name in NAMES if any(distributions(name=name))}


def load(name: str) -> Any:
    """Return a peer's module by its full name."""
    import datasets  # noqa: F401  these look for DeepSpeed and Ray, so come before stubs
    import transformers  # noqa: F401

    for bare in BARE:
        top = bare.split(".")[0]
        if bare not in sys.modules and top in installed():
            module = sys.modules[bare] = ModuleType(bare)
            module.__path__ = [str(distribution(top).locate_file(bare.replace(".", "/")))]
    for stub in STUBS:
        if stub not in sys.modules and ("." in stub or not find_spec(stub)):
            sys.modules[stub] = MagicMock(__spec__=ModuleSpec(stub, None))
    return importlib.import_module(name)


def trainer(**settings: Any) -> Any:
    """Return a stub of a trainer on one process that has these attributes."""

    def same(value: Any, **_: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device="cpu",
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        num_processes=1,
        parallelism_config=None,
    )
    stub = MagicMock(
        accelerator=accelerator, aux_loss_enabled=False, current_gradient_accumulation_steps=1
    )
    stub._metrics = defaultdict(lambda: defaultdict(list))
    stub.model.training = False
    for name, value in settings.items():
        setattr(stub, name, value)
    return stub


@cache
def code(method: Any, begins: str) -> CodeType:
    """Return the compiled statement of `method` that begins so."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(begins)
    ]
    return compile(ast.Module(found[:1], []), inspect.getfile(method), "exec")


def statements(method: Any, begins: str, scope: dict[str, Any]) -> SimpleNamespace:
    """Run that statement as it stands, and return the variables after it."""
    names = {**inspect.unwrap(method).__globals__, **scope}
    exec(code(method, begins), names)
    return SimpleNamespace(**names)

"""The scripts of examples/, as modules and as programs."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from nemorl.runtime.config import tree
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.start import registry

EXAMPLES = Path(__file__).parent.parent / "examples"


@contextmanager
def forgetting_own() -> Iterator[None]:
    """Take back at the end what was added to the variants of sections of GRPO."""
    known = {name: GRPOConfig.__annotations__[name] for name in ("loss", "advantage")}
    try:
        yield
    finally:
        for section, hint in known.items():
            GRPOConfig.__annotations__[section] = hint
            GRPOConfig.__dataclass_fields__[section].type = hint
        tree._adapter.cache_clear()


@contextmanager
def visiting() -> Iterator[None]:
    """As for a script in examples/; what it registers is taken back."""
    tables = [
        getattr(registry, table)
        for table in ("ALGORITHMS", "TRAINING_BACKENDS", "GENERATION_BACKENDS")
    ]
    before = [dict(table) for table in tables]
    sys.path.insert(0, str(EXAMPLES))
    try:
        with forgetting_own():
            yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for table, known in zip(tables, before, strict=True):
            table.clear()
            table.update(known)


def load_example(name: str) -> ModuleType:
    """An example as a module."""
    with visiting():
        return importlib.import_module(name)


def run_example(script: str, *arguments: str) -> int:
    """Run an example as a program in the present folder, and return its exit code."""
    before, sys.argv = sys.argv, [str(EXAMPLES / script), *arguments]
    try:
        with visiting():
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0

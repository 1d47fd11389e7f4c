"""Import the user's functions and modules by name, and refuse an exit in them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any


def function_of(name: str, setting: str) -> Any:
    """Return what `module:function` or `path/to/file.py:function` names.

    Raises: ValueError, about `setting`, where there is none.
    """
    module, _, attribute = name.rpartition(":")
    found = module_of(module, setting)
    if not hasattr(found, attribute):
        raise ValueError(
            f"{setting} must name a function as module:function, but {found.__file__} has no"
            f" {attribute!r}"
        )
    return getattr(found, attribute)


def module_of(name: str, setting: str) -> ModuleType:
    """Import a module by its name, also from the working folder, or by its file's path."""
    file = Path(name).expanduser().absolute() if name.endswith(".py") else Path.cwd() / name
    if str(file.parent) not in sys.path:  # an installed command does not look where it is run
        sys.path.insert(0, str(file.parent))
    module = file.name.removesuffix(".py")
    invalidate_caches()
    try:
        with exit_is_error(f"{setting} {name}"):
            found = import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another that isn't
        raise ValueError(
            f"{setting} must name a module or a .py file, but there is no module {module!r} in"
            f" {file.parent} or installed: check its name"
        ) from None
    if name.endswith(".py") and (other := getattr(found, "__file__", None)) != str(file):
        raise ValueError(
            f"{setting} must be a file whose name no other module has, but {name} has that of"
            f" {other or 'a part of Python'}: rename it"
        )
    return found


@contextmanager
def exit_is_error(name: str) -> Iterator[None]:
    """Raise a RuntimeError for a sys.exit in the block, which would end the run without a word. A
    signal that ends the run is none.
    """
    try:
        yield
    except SystemExit as error:
        if type(error) is not SystemExit:  # Terminated, by SIGTERM
            raise
        raise RuntimeError(
            f"{name} must not end the run, but it called sys.exit({error.code!r}): raise an"
            " exception instead"
        ) from error

"""Import the user's functions and modules by name."""

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from nemorl.rollout.calls import exit_is_error


def function_of(name: str, setting: str) -> Any:
    """Return what `module:function` or `path/to/file.py:function` names."""
    module, attribute = _parts(name)
    if not attribute:
        check_function(name, setting)
    found = module_of(module, setting)
    if not hasattr(found, attribute):
        raise _no_function(attribute, setting, found.__file__)
    return getattr(found, attribute)


def check_function(name: str, setting: str) -> None:
    """Raise ValueError where `function_of` would find nothing. Runs no code."""
    module, attribute = _parts(name)
    if module in sys.modules:
        return
    file = _found(module)
    if file is None or not file.is_file():
        if module.endswith(".py") or find_spec(module.partition(".")[0] or " ") is None:
            raise _no_module(module, setting, _file_of(module).parent)
        return
    if file.suffix != ".py":
        return  # compiled
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    try:
        bound = {*_bound(ast.parse(file.read_bytes()))}
    except (SyntaxError, ValueError) as error:
        place = f"{shown}, line {error.lineno}" if isinstance(error, SyntaxError) else shown
        raise _unreadable(setting, place, getattr(error, "msg", error)) from None
    if not attribute or bound.isdisjoint((attribute, "*", "__getattr__")):
        raise _no_function(attribute, setting, shown)


def _parts(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(":")
    return (module, attribute) if module else (attribute, "")


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                yield from _bound(node)


def _unreadable(setting: str, place: object, error: object) -> ValueError:
    return ValueError(f"{setting} must name code that Python can read, but {place}: {error}")


def _no_function(attribute: str, setting: str, file: object) -> ValueError:
    names = []
    if str(file).endswith(".py"):
        body = ast.parse(Path(str(file)).read_bytes()).body
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        names = [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]
    has = f"has no {attribute!r}" if attribute else "is a whole file"
    return ValueError(
        f"{setting} must name a function as module:function, but {file} {has}"
        f"{': it has ' * bool(names)}{', '.join(names)}"
    )


def _no_module(module: str, setting: str, folder: Path) -> ValueError:
    return ValueError(
        f"{setting} must name a module or a .py file, but there is no module {module!r} in"
        f" {folder} or installed: check its name"
    )


def same_function(name: str, other: str) -> bool:
    """Return whether two names are of one function.

    >>> same_function("./f.py:fn", "f.py:fn"), same_function("f.py:fn", "g.py:fn")
    (True, False)
    """

    def place(name: str) -> object:
        module, attribute = _parts(name)
        file = _found(module, sys.path)
        return (file.resolve(), attribute) if file else name

    return place(name) == place(other)


def _file_of(name: str) -> Path:
    return Path(name).expanduser().absolute() if name.endswith(".py") else Path.cwd() / name


def _found(module: str, others: Sequence[str] = ()) -> Path | None:
    """Imports nothing."""
    file = _file_of(module)
    if not module or module.endswith(".py"):
        return file if module else None
    folder = str(file.parent)
    folders = [*others] if folder in others else [folder, *others]
    place = None
    invalidate_caches()
    for part in file.name.split("."):
        if (spec := PathFinder.find_spec(part, folders)) is None:
            return None
        folders = [*(spec.submodule_search_locations or ())]
        place = spec.origin or next(iter(folders), None)
    return Path(place) if place else None


def module_of(name: str, setting: str) -> ModuleType:
    """Import the module that a name or the path of a .py file names. Raises: ValueError."""
    file = _file_of(name)
    if str(file.parent) not in sys.path:  # an installed command does not look where it is run
        sys.path.insert(0, str(file.parent))
    module = file.name.removesuffix(".py")
    invalidate_caches()
    try:
        with exit_is_error(f"{setting} {name}"):
            found = import_module(module)
    except SyntaxError as error:
        place = f"{error.filename or file}, line {error.lineno}" if error.lineno else name
        raise _unreadable(setting, place, error.msg) from None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another that isn't
        raise _no_module(module, setting, file.parent) from None
    if name.endswith(".py") and (other := getattr(found, "__file__", None)) != str(file):
        raise ValueError(
            f"{setting} must be a file whose name no other module has, but {name} has the name of"
            f" {other or 'a part of Python'}: rename it"
        )
    return found

"""The checks behind conftest.py's import hook, before which nothing of nemorl is imported."""

import dataclasses
import random
import re
import threading
from collections import ChainMap
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any, get_args
from unittest import mock

import jaxtyping
from jaxtyping import _import_hook

# beartype checks a random item of a list. It gets a generator of its own, so that a test which
# seeds Python's sees the draws of the run alone.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An int will do where a float is asked for, as type checkers have it."""
with_shapes = jaxtyping.jaxtyped
LIBRARY = with_shapes.__code__.co_filename
"""Where the wrappers here seem to be, as warnings skip the frames of libraries."""


def jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Do as `jaxtyping.jaxtyped`, but quickly.

    Checks are made at the first call: of types alone where there are no shapes, which take 20 times
    as long, and none in functions of functions without shapes.
    """

    def decorate(checked: Any) -> Any:
        if isinstance(checked, FunctionType):
            return _at_first_call(checked, typechecker)
        if dataclasses.is_dataclass(checked) and "__init__" in vars(checked):
            checked.__init__ = _at_first_call(checked.__init__, typechecker)
        return checked

    return decorate


def _at_first_call(fn: FunctionType, typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    hints = fn.__annotations__.values()
    if not hints or ("<locals>" in fn.__qualname__ and not any(_has_shape(x, fn) for x in hints)):
        return fn
    checked: Callable[..., Any] | None = None

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        if checked is None:
            shaped = any(_has_shape(hint, fn) for hint in hints)
            checked = with_shapes(fn, typechecker=typechecker) if shaped else typechecker(fn)
            if not shaped and checked is not fn:  # there may be nothing to check
                checked.__code__ = checked.__code__.replace(co_filename=LIBRARY)
        return checked(*args, **kwargs)

    wrapper.__code__ = wrapper.__code__.replace(co_filename=LIBRARY)
    return wrapper


def _has_shape(hint: Any, fn: FunctionType) -> bool:
    if isinstance(hint, str):
        known = ChainMap(fn.__globals__, fn.__builtins__)
        names = re.findall(r"[A-Za-z_]\w*", hint)
        return any(name not in known or _has_shape(known[name], fn) for name in names)
    if isinstance(hint, list | tuple):
        return any(_has_shape(part, fn) for part in hint)
    module = getattr(hint, "__module__", "") or ""
    return module.startswith("jaxtyping") or _has_shape(get_args(hint), fn)


jaxtyping.jaxtyped = jaxtyped  # where the hook looks for it


READING = threading.Lock()


def get_code(loader: _import_hook._JaxtypingLoader, name: str) -> CodeType | None:
    """Return a module's code with checks, from a cache that imports without the hook never read.

    jaxtyping replaces the function that names caches while a module runs, imports included. Of two
    threads the first to end would put back the ordinary one, and code with checks would be cached
    where processes without the hook find it. Here it is replaced while code is read, by one thread
    at a time.
    """
    named = partial(_import_hook._optimized_cache_from_source, loader._typechecker.get_hash())
    with READING, mock.patch("importlib._bootstrap_external.cache_from_source", named):
        return SourceFileLoader.get_code(loader, name)


_import_hook._JaxtypingLoader.get_code = get_code
_import_hook._JaxtypingLoader.exec_module = SourceFileLoader.exec_module

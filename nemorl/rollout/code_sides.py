"""Both sides of a test: a sampled program, and the tests that call its functions.

Each is this script in its own sandbox: a program neither sees its tests nor answers for them.
Between them go pickles that hold plain data alone.
"""

import ast
import builtins
import importlib
import json
import os
import pickle
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO


class Received(pickle.Unpickler):
    """Refuses what would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def plain(value: Any) -> Any:
    """Return arrays and subclasses of containers as plain ones."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(map(plain, value))
    return value


def answer_calls(source: str, calls: BinaryIO, answers: BinaryIO) -> None:
    """Run a program, then call its functions as asked."""
    program = sys.modules["program"] = types.ModuleType("program")
    exec(compile(source, "program.py", "exec"), vars(program))
    while True:
        name, args, kwargs = Received(calls).load()
        try:
            answer = pickle.dumps(("", plain(vars(program)[name](*args, **kwargs))))
        except Exception as error:
            known = name in vars(program)
            answer = pickle.dumps((type(error).__name__, str(error)) if known else None)
        answers.write(answer)
        answers.flush()


def passed(tests: list[str], head: str, function: Callable[..., Callable[..., Any]]) -> list[bool]:
    """Return whether each test raises nothing, and the program only errors that the tests name.

    Iteration, `hasattr` and others take some errors for an end. `head`: code that the tests know.
    """
    space: dict[str, Any] = {"__name__": "tests"}
    exec(head, space)
    space["__name__"] = "__main__"  # a guard of the tests must not hide them
    found: list[bool] = []
    raised: list[tuple[type, ...]] = []
    named: set[Any] = set()
    for test in tests:
        nodes = list(ast.walk(ast.parse(test)))
        for node in nodes:
            match node:
                case ast.Attribute(value=ast.Name(id=name)) if name in sys.stdlib_module_names:
                    space.setdefault(name, importlib.import_module(name))
        for node in nodes:
            match node:
                case ast.ExceptHandler(type=None):
                    named.add(Exception)
                case ast.Name(id=name) if hasattr(builtins, name):
                    named.add(getattr(builtins, name))
                case ast.Name(id=name):
                    space.setdefault(name, function(name, raised))
        raised.clear()
        try:
            exec(test, space)
            found.append(not any(map(named.isdisjoint, raised)))
        except BaseException:
            found.append(False)
    return found


def remote(
    calls: BinaryIO, answers: BinaryIO, name: str, raised: list[tuple[type, ...]]
) -> Callable[..., Any]:
    """Return a function that the program's answers. `raised` gets the bases of its errors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raised.append(())  # stays where no answer comes
        calls.write(pickle.dumps((name, plain(args), plain(kwargs))))
        calls.flush()
        error, value = Received(answers).load()
        if not error:
            raised.pop()
            return value
        kind: Any = getattr(builtins, error, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or kind is StopIteration:
            kind, value = RuntimeError, f"{error}: {value}"
        raised[-1] = kind.__mro__[:-1]
        raise kind(value)

    return call


if __name__ == "__main__":
    given = sys.stdin.read()
    reads, writes = os.fdopen(int(sys.argv[2]), "rb"), os.fdopen(int(sys.argv[3]), "wb")
    if sys.argv[1] == "program":
        answer_calls(given, reads, writes)
    stdout, sys.stdout = sys.stdout, sys.stderr
    tests, head = json.loads(given)
    print(json.dumps(passed(tests, head, partial(remote, writes, reads))), file=stdout)

"""Python that models wrote, parsed by any number of threads."""

import ast
from threading import Lock
from typing import Any

_ONE_AT_A_TIME = Lock()
"""CPython before 3.11.8 and 3.12.2 counts the depths of all threads' trees in one number, and ends
with SystemError where a garbage collection lets another thread in (gh-106905)."""


def parse(text: str, mode: str = "exec") -> Any:
    """Return the syntax tree of a text, as `ast.parse`. Raises: SyntaxError, ValueError."""
    with _ONE_AT_A_TIME:
        return ast.parse(text, mode=mode)

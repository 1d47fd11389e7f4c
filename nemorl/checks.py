"""How a wrong value is refused, everywhere alike: field, requirement, value, remedy."""

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any


def require(condition: bool, field_name: str, requirement: str, value: object, remedy: str) -> None:
    """Raise a ValueError that names the field, the requirement, the value and the remedy.

    >>> require(False, "optimizer.lr", "must be positive", -1.0, "try 1e-5")
    Traceback (most recent call last):
    ValueError: optimizer.lr must be positive, but it is -1.0: try 1e-5
    """
    if not condition:
        raise ValueError(f"{field_name} {requirement}, but it is {value!r}: {remedy}")


def at_least(minimum: float, **values: float | None) -> None:
    """Require that no value is below `minimum`; optimizer__lr is the field optimizer.lr."""
    for name, value in values.items():
        require(
            value is None or value >= minimum,
            name.replace("__", "."),
            f"must be at least {minimum}",
            value,
            f"use {minimum} or more",
        )


def closest(word: str, words: Iterable[str]) -> str:
    """Return a did-you-mean for an error message, or nothing.

    >>> closest("dtenosr", ["dtensor", "megatron"])
    '; did you mean dtensor?'
    """
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)
    return f"; did you mean {matches[0]}?" if matches else ""


def own_methods(value: Any, protocol: type) -> set[str]:
    """Return which methods of a Protocol a class or object has, but for those that it inherits from
    the Protocol itself, which do nothing.
    """
    kind = value if isinstance(value, type) else type(value)
    listed = kind if protocol is object else protocol
    names = [name for name in dir(listed) if name[0] != "_" and callable(getattr(listed, name))]
    return {
        name
        for name in names
        if callable(getattr(value, name, None))
        and getattr(kind, name, None) is not getattr(protocol, name, None)
    }


def short(value: object, limit: int = 120) -> str:
    """Return a value as errors show it: without the middle if it is longer than `limit`.

    >>> short("a" * 1000, 20)
    "'aaaaaaaaa … 982 characters … aaaaaaaaa'"
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, too deep a nesting
        text = f"<{type(value).__name__}>"
    half = limit // 2
    cut = len(text) - 2 * half
    return text if cut <= 0 else f"{text[:half]} … {cut} characters … {text[-half:]}"


def refuse_unused(
    section: str, config: Any, requirement: str, remedy: str, *, names: Iterable[str] | None = None
) -> None:
    """Raise a ValueError for a setting that nothing would use.

    That is a field of `config`, the dataclass of `section`, with another value than its default;
    `names` says which fields are not used, None that none is.
    """
    for item in fields(config):
        if names is None or item.name in names:
            value = getattr(config, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            require(value == default, f"{section}.{item.name}", requirement, value, remedy)

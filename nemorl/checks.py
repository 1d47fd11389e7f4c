"""Refusals of wrong values (field, requirement, value, remedy), warnings with the user's line."""

import difflib
import math
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from os import sep
from pathlib import Path
from typing import Any

LARGEST = (2 - 2**-23) * 2.0**127
"""What float32 holds."""


def require(condition: bool, field_name: str, requirement: str, value: object, remedy: str) -> None:
    """Raise a ValueError that names the field, the requirement, the value and the remedy.

    >>> require(False, "optimizer.lr", "must be positive", -1.0, "try 1e-5")
    Traceback (most recent call last):
    ValueError: optimizer.lr must be positive, but it is -1.0: try 1e-5
    """
    if not condition:
        raise ValueError(f"{field_name} {requirement}, but it is {value!r}: {remedy}")


@contextmanager
def checked_by(backend: str) -> Iterator[None]:
    """Run a backend's `check` in the block; errors other than ValueErrors name it."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        error.add_note(f"in check() of the {backend}, where a ValueError says what it refuses")
        raise


def at_least(minimum: float, **values: float | None) -> None:
    """Require that no value is below `minimum`; optimizer__lr is the field optimizer.lr."""
    for name, value in values.items():
        fits, least = value is None or value >= minimum, f"must be at least {minimum}"
        require(fits, name.replace("__", "."), least, value, f"use {minimum} or more")


def valid_seed(**values: int | None) -> None:
    """Require that seeds are from 0 to 2^63 − 1; run__seed is the field run.seed.

    >>> valid_seed(run__seed=10**23)
    Traceback (most recent call last):
    ValueError: run.seed must be below 2^63, but it is 100000000000000000000000: use a smaller one
    """
    at_least(0, **values)
    for name, value in values.items():
        fits = value is None or value < 2**63
        require(fits, name.replace("__", "."), "must be below 2^63", value, "use a smaller one")


def closest(word: str, words: Iterable[str]) -> str:
    """Return a did-you-mean for a misspelled word, or nothing; parts of names are compared apart.

    >>> closest("dtenosr", ["dtensor", "megatron"])
    '; did you mean dtensor?'
    >>> closest("batch_size", ["max_batch_size"]), closest("kl", ["lr"])
    ('', '')
    """
    near = [each for each in words if _misspelled(_parts(word), _parts(each))]
    alike = difflib.get_close_matches(word, near, n=1, cutoff=0)
    return f"; did you mean {alike[0]}?" if alike else ""


def _parts(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", re.sub("([a-z])([A-Z])", r"\1_\2", name).lower())


def _misspelled(parts: list[str], others: list[str]) -> bool:
    same = len(parts) == len(others) and all(
        _one_word(part, other) or (len(parts) > 1 and _one_letter(part, other))
        for part, other in zip(parts, others, strict=True)
    )
    return same or "".join(parts) == "".join(others)


def _one_letter(word: str, other: str) -> bool:
    """Return whether words of four letters or more differ in one, a slip if others are equal."""
    unlike = [one + two for one, two in zip(word, other, strict=False) if one != two]
    return len(word) == len(other) >= 4 and len(unlike) == 1 and unlike[0].isalpha()


def _one_word(word: str, other: str) -> bool:
    """Whether two words are one with a slip: swapped or doubled letters, or a beginning."""
    if sorted(word) == sorted(other):
        return True
    if re.sub(r"\D", "", word) != re.sub(r"\D", "", other):
        return False  # beta1 is not beta2
    short, long = sorted((word, other), key=len)
    if len(short) <= 2:
        return {*short} == {*long} and len(long) <= len(short) + 1  # lrr is lr, top is not tp
    alike = difflib.SequenceMatcher(None, word, other).ratio() >= 0.8
    return long.startswith(short) or (alike and (len(short) > 4 or word[0] == other[0]))


def has_own(value: Any, name: str, protocol: type) -> bool:
    """Return whether a class or object has a method, other than a Protocol's that it inherits."""
    kind = value if isinstance(value, type) else type(value)
    inherited = getattr(kind, name, None) is getattr(protocol, name, None)
    return callable(getattr(value, name, None)) and not inherited


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


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or float that float32 holds; True and False are none.

    >>> is_number(1), is_number(True), is_number(float("nan")), is_number(10**400)
    (True, False, False, False)
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= LARGEST


def as_number(value: Any) -> float:
    """Return a value as a float, or nan unless it is one number that float32 holds.

    >>> as_number(True), as_number("1"), as_number(1e39)
    (1.0, nan, nan)
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several numbers, or a huge one
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


def all_but(cls: Any, *used: str) -> tuple[str, ...]:
    """Return the fields of a dataclass without some."""
    return tuple(item.name for item in fields(cls) if item.name not in used)


def refuse_unused(
    section: str, config: Any, requirement: str, remedy: str, *, names: Iterable[str] | None = None
) -> None:
    """Raise a ValueError for a setting that nothing would use, and that is not its default.

    names: the fields of `config` that are not used; None: all.
    """
    for item in fields(config):
        if names is None or item.name in names:
            value = getattr(config, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            name = f"{section}.{item.name}".strip("._")
            require(value == default, name, requirement, value, remedy)


INSIDE = (f"{Path(__file__).parent}{sep}", f"{sysconfig.get_path('stdlib')}{sep}", "<frozen ")
"""How the names of files begin that are not the user's; installed packages are not, either."""


def warn(message: str) -> None:
    """Issue a UserWarning for the line of the script or notebook cell that called nemorl.

    In a thread it names the line that called this function.
    """
    here = frame = sys._getframe(1)
    while (name := frame.f_code.co_filename).startswith(INSIDE) or f"-packages{sep}" in name:
        if frame.f_back is None:
            frame = here
            break
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )

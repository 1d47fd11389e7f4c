"""The types of values in a run's files. Values of other types are dropped where they are read."""

from collections.abc import Callable, Mapping
from typing import Any

from nemorl.checks import is_number, short
from nemorl.warn import warn

Shape = Callable[[Any], bool]
"""Returns whether a value has the type that is written."""


def is_count(value: Any) -> bool:
    """Return whether a value is an integer from 0 that a float holds, too."""
    return type(value) is int and 0 <= value < 2**53


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def is_time(value: Any) -> bool:
    """Return whether a value is a time in seconds since the epoch, of a year with four digits."""
    return is_number(value) and 0 <= value < 2**37


def is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_mapping(value: Any) -> bool:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def optional(shape: Shape) -> Shape:
    """Return the shape of what may be None."""
    return lambda value: value is None or shape(value)


def list_of(shape: Shape) -> Shape:
    """Return the shape of a list of values of one shape."""
    return lambda value: isinstance(value, list) and all(map(shape, value))


def fields_of(**shapes: Shape) -> Shape:
    """Return the shape of a mapping that has these keys, among others."""
    return lambda value: is_mapping(value) and not wrong_fields(value, shapes)


def wrong_fields(values: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    """Return the names whose values are missing or of another shape."""
    return [name for name, fits in shapes.items() if not fits(values.get(name))]


def without_wrong(
    values: Mapping[str, Any], shapes: Mapping[str, Shape], place: str
) -> dict[str, Any]:
    """Return the values without None and wrong ones at these names; wrong ones are warned of.

    place: the file, and the line or section in it, as warnings name it.

    >>> without_wrong({"step": 1, "loss": None}, {"step": is_count, "loss": is_number}, "a file")
    {'step': 1}
    """
    wrong = wrong_fields(values, {name: optional(shape) for name, shape in shapes.items()})
    for name in wrong:
        warn(f"{place} has a wrong {name}, which is omitted: {short(values[name], 80)}")
    return {
        name: value
        for name, value in values.items()
        if name not in wrong and (value is not None or name not in shapes)
    }

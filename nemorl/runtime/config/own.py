"""A function of the user's as a variant of a section: its keyword parameters are the settings."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, make_dataclass
from functools import partial
from keyword import iskeyword
from typing import Any, ClassVar, Literal, TypeVar

Section = TypeVar("Section", bound="OwnFunction")


@dataclass(frozen=True, kw_only=True)
class OwnFunction:
    """The settings of a function of the user's; `section_of` derives one for each."""

    name: Literal["module:function"] = "module:function"

    data: ClassVar[tuple[str, ...]] = ()
    """What the function's first parameters get."""
    extra: ClassVar[tuple[str, ...]] = ()
    """What it gets by name if it has a parameter of that name."""
    function: ClassVar[Callable[..., Any]]
    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of `extra` it has."""
    _unchecked = False


def section_of(base: type[Section], name: str, function: Any, setting: str) -> type[Section]:
    """Return a section derived from `base` with the parameters of `function` as settings.

    The first are the data of `base`, those in `extra` are given, the rest are settings.
    Raises: ValueError, about `setting`, for a function with other parameters.
    """
    wanted = f"fn({', '.join(base.data)}, *, your_setting=0.1)"
    if not callable(function) or isinstance(function, type):
        raise ValueError(
            f"{setting} must be a function {wanted}, but {name} is {function!r}: name a function"
        )
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise ValueError(
            f"{setting} must have annotations that exist, but of {name} {error}: import it"
        ) from None
    parameters = list(signature.parameters.values())
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first, others = parameters[: len(base.data)], parameters[len(base.data) :]
    fits = len(first) == len(base.data) and all(p.kind in by_place for p in first)
    named = [p for p in others if p.kind in (*by_place, p.KEYWORD_ONLY)]
    settings = [p for p in named if p.name not in base.extra]
    if not fits or any(p.default is p.empty and p.kind in by_place for p in settings):
        raise ValueError(
            f"{setting} must be a function {wanted}, but {name} is"
            f" fn({', '.join(signature.parameters)}): give it these parameters"
        )
    for parameter in settings:
        _check_setting(parameter, setting)
    defaults = (MISSING if p.default is p.empty else p.default for p in settings)
    return _derived(
        base,
        name,
        [
            (p.name, _type(p, setting), field(default=default))
            for p, default in zip(settings, defaults, strict=True)
        ],
        __doc__=(inspect.getdoc(function) or "A function of your own.").split("\n\n")[0],
        function=staticmethod(function),
        takes=frozenset(p.name for p in named if p.name in base.extra),
    )


def _derived(base: type[Section], name: str, settings: Sequence[Any], **others: Any) -> Any:
    chosen = ("name", Literal[name], field(default=name))
    return make_dataclass(
        re.sub(r"\W", "_", name),
        [chosen, *settings],
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace=others,
    )


def unchecked_section(base: type[Section], name: str, given: Mapping[str, Any]) -> type[Section]:
    """Return a section with settings as given, of a function that is not imported."""
    return _derived(
        base,
        name,
        [
            (key, Any, field(default_factory=partial(copy, value)))
            for key, value in given.items()
            if key.isidentifier() and not iskeyword(key) and key not in OwnFunction.__annotations__
        ],
        __doc__=f"Not checked: {name} was not imported, as only a file names it.",
        _unchecked=True,
    )


def _check_setting(parameter: inspect.Parameter, setting: str) -> None:
    reserved = [*OwnFunction.__annotations__]
    if parameter.name in reserved:
        raise ValueError(
            f"{setting}.{parameter.name} can't be a setting, because {', '.join(reserved)} have"
            " another meaning: rename the parameter"
        )
    if type(parameter.default).__hash__ is None:
        raise ValueError(
            f"{setting}.{parameter.name} must have a default that can't be changed, but it is"
            f" {parameter.default!r}: use a tuple, or None"
        )


def _type(parameter: inspect.Parameter, setting: str) -> Any:
    from pydantic import PydanticSchemaGenerationError, TypeAdapter

    hint = parameter.annotation
    if hint is parameter.empty:
        guessed = type(parameter.default)
        return guessed if guessed in (bool, int, float, str) else Any
    try:
        TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        raise ValueError(
            f"{setting}.{parameter.name} must be of a type that a setting can have, but it is"
            f" {hint}: use bool, int, float, str, Literal or a tuple of them"
        ) from None
    return hint


def settings_of(section: Any) -> dict[str, Any]:
    """Return the settings of a variant without its name."""
    return {key: value for key, value in asdict(section).items() if key != "name"}

"""Settings from nested mappings and YAML files to frozen dataclasses, and back; a union of
dataclasses is a section whose `name` chooses one.
"""

import dataclasses
import functools
import inspect
import json
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from nemorl.checks import require
from nemorl.rollout.user_code import function_of, same_function
from nemorl.runtime.config.spellings import advice, algorithm_hint, meaning_of, means_another, table
from nemorl.runtime.config.yaml_io import SECRET, ConfigError, Trust, dump, read, without_secrets
from nemorl.runtime.config.yaml_io import texts_in as texts_in

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


def section_of(base: type[Section], name: str, function: Any, setting: str) -> type[Section]:
    """Return a section derived from `base`, with the other parameters of `function` as settings.

    Raises: ValueError, about `setting`, for a function with other parameters.
    """
    wanted = f"{setting} must be a function fn({', '.join(base.data)}, *, your_setting=0.1), but"
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{wanted} {name} is {function!r}: name a function")
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
            f"{wanted} {name} is fn({', '.join(signature.parameters)}): give it these parameters"
        )
    fields: list[Any] = [("name", Literal[name], dataclasses.field(default=name))]
    for each in settings:
        default = MISSING if each.default is each.empty else each.default
        fields.append((each.name, _type(each, setting), dataclasses.field(default=default)))
    return make_dataclass(
        re.sub(r"\W", "_", name),
        fields,
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace={
            "__doc__": (inspect.getdoc(function) or "A function of your own.").split("\n\n")[0],
            "function": staticmethod(function),
            "takes": frozenset(p.name for p in named if p.name in base.extra),
        },
    )


def _type(parameter: inspect.Parameter, setting: str) -> Any:
    """Return the type of a setting. Raises: ValueError for a parameter that can't be one."""
    from pydantic import PydanticSchemaGenerationError, TypeAdapter

    key, hint, default = f"{setting}.{parameter.name}", parameter.annotation, parameter.default
    if parameter.name in (reserved := [*OwnFunction.__annotations__]):
        raise ValueError(
            f"{key} can't be a setting, because {', '.join(reserved)} have another meaning: rename"
            " the parameter"
        )
    if hint is parameter.empty:
        return type(default) if type(default) in (bool, int, float, str) else Any
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # also an array: not in settings
        parts = [each for each in typing.get_args(hint) if not hasattr(each, "array_type")]
        hint = typing.Union[tuple(parts)]  # noqa: UP007
    try:
        TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        raise ValueError(
            f"{key} must be of a type that a setting can have, but it is {hint}: use bool, int,"
            " float, str, Literal or a tuple of them"
        ) from None
    return hint


def settings_of(section: Any) -> dict[str, Any]:
    """Return the settings of a variant without its name."""
    return {key: value for key, value in asdict(section).items() if key != "name"}


Config = TypeVar("Config")


def from_dict(cls: type[Config], mapping: Mapping[str, Any]) -> Config:
    """Return the config that nested sections describe."""
    return construct(cls, layer(cls, {}, mapping))


def to_dict(settings: Any) -> dict[str, Any]:
    """Return a config as nested plain values, ready for YAML or JSON."""
    return asdict(settings, dict_factory=lambda pairs: {key_of(name): each for name, each in pairs})


def key_of(name: str) -> str:
    """Return the key of a field: `async` of `async_`, which Python could not name."""
    return name.removesuffix("_")


def load_config(cls: type[Config], path: str | Path, *, trust_code: bool = False) -> Config:
    """Return the config that a YAML file describes; errors name the file and line.

    trust_code: allow code that the file names (a reward `./f.py:fn`).
    """
    trust = Trust(runs="all" if trust_code else "given")
    config = construct(cls, yaml_layer(cls, {}, path, trust))
    require_secrets(config)
    return config


def require_secrets(settings: Any) -> None:
    """Raise ConfigError for a setting from a file that a secret was left out of."""
    for key, value in values(type(settings), to_dict(settings)).items():
        if f'"{SECRET}"' in (text := json.dumps(value, default=str)):
            flag = shlex.join([f"--{key}".replace("_", "-"), text])
            raise ConfigError(
                f"{key} must be given again, as no file keeps a secret: add {flag} with your own in"
                f" place of {SECRET}",
                key,
            )


def dump_yaml(settings: Any, *, comments: bool = False) -> str:
    """Return a config as YAML that `load_config` reads back as an equal one, but for secrets;
    `comments` explain every key.
    """
    tree, about = without_secrets(to_dict(settings)), dict[str, str]()
    for section, names in getattr(settings, "unused", {}).items():
        tree[section] = {key: value for key, value in tree[section].items() if key not in names}
    for key, hint, doc, _ in walk(type(settings), to_dict(settings)) if comments else ():
        literals = [part for part in kinds(hint) if typing.get_origin(part) is Literal]
        choices = [str(each) for part in literals for each in typing.get_args(part)]
        one_of = f"One of {', '.join(choices)}." if len(choices) > 1 else ""
        about[key] = f"{doc} {one_of}".strip()
    return dump(tree, about)


Setting = tuple[str, Any, str, Any]
"""Key, type, documentation, and value or default (`...`: there is none)."""


def walk(
    cls: type, tree: Mapping[str, Any], prefix: str = "", names: Sequence[str] = ()
) -> Iterator[Setting]:
    """Yield each section and setting of a tree over the defaults, of a union those of the variant
    that it names.

    names: the variants that the setting `name` chooses from.
    """
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    tree = defaults(cls) | dict(tree)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], key_of(field.name)
        key, value = prefix + name, tree.get(name, ...)
        if section := variants(plain(hint)):
            members = by_name(section) if len(section) > 1 else {}
            member = members[value["name"]] if members else section[0]
            yield key, member, inspect.getdoc(member) or "", value
            yield from walk(member, value, f"{key}.", [*members])
        else:
            hint = Literal[tuple(names)] if names and name == "name" else hint
            value = tuple(value) if isinstance(value, list) else value
            yield key, hint, docs.get(field.name, ""), value


def values(cls: type, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each setting of a tree that has one, by its dotted key."""
    return {
        key: value
        for key, hint, _, value in walk(cls, tree)
        if value is not ... and not dataclasses.is_dataclass(hint)
    }


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field, as one line."""
    from docstring_parser import parse_from_object

    return {
        field.arg_name: " ".join((field.description or "").split())
        for base in reversed(cls.__mro__[:-1])
        for field in parse_from_object(base).params
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level.

    >>> flat({"optimizer": {"lr": 1e-5}, "max_num_steps": 4})
    {'optimizer.lr': 1e-05, 'max_num_steps': 4}
    """
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `flat`, two levels deep."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override` laid over `base`. A section whose `name` changes starts afresh."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping):
            if value is None:
                continue
            if isinstance(value, str) and "name" in old:
                value = {"name": value}
            if isinstance(value, Mapping) and value.get("name", name := old.get("name")) == name:
                value = merge(old, value)
        merged[key] = value
    return merged


def layer(cls: type, tree: Mapping[str, Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mapping` laid over `tree` (over the defaults if that is empty).

    Only keys and types are checked; functions of the user's are imported.
    """
    merged = merge(tree or defaults(cls), mapping)
    for section, members in own_sections(cls).items():
        name, base = _name_in(mapping, section), members[OwnFunction.name]
        if (":" in name or name.endswith(".py")) and members.get(name, base) is base:
            add_own(cls, section, name, function_of(name, section))
    if mapping:
        construct(cls, merged, ignored=("value_error", "missing"))
    return merged


def own_sections(cls: type) -> dict[str, dict[str, Any]]:
    """Return the sections that may be a function, with their variants by name."""
    return {key: members for key, members in unions(cls).items() if OwnFunction.name in members}


def _name_in(tree: Mapping[str, Any], section: str) -> str:
    chosen = tree.get(section)
    name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    return name if isinstance(name, str) else ""


def add_own(cls: type, section: str, name: str, function: Any) -> None:
    """Make a function a variant of a section of a config; see `section_of`."""
    members = unions(cls)[section]
    base = members[OwnFunction.name]
    taken = name in members and not issubclass(members[name], base)
    require(not taken, section, "must have a name of its own", name, "choose another")
    owner: Any = next(
        each for each in cls.__mro__ if section in vars(each).get("__annotations__", {})
    )
    hint = typing.get_type_hints(owner, include_extras=True)[section]
    members = {**by_name(variants(plain(hint))), name: section_of(base, name, function, section)}
    union: Any = typing.Union.__getitem__(tuple(members.values()))
    owner.__annotations__[section] = typing.Annotated[(union, *hint.__metadata__)]
    owner.__dataclass_fields__[section].type = owner.__annotations__[section]
    _adapter.cache_clear()


def yaml_layer(
    cls: type,
    tree: Mapping[str, Any],
    path: str | Path,
    trust: Trust,
    *,
    used: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Return `layer` of what is `used` of a YAML file. Raises: ConfigError with file and line."""
    mapping, lines = read(path)
    with located(path, lines):
        mapping = used(mapping)
        trust.require(mapping)
        mapping.pop("environment", None)
        for section in own_sections(cls):
            name, flag = _name_in(mapping, section), trust.given.get(section)
            if ":" not in name or flag is None:
                continue
            if same_function(name, flag):
                chosen = mapping[section] if isinstance(mapping[section], Mapping) else {}
                mapping[section] = {**chosen, "name": flag}
            else:
                del mapping[section]
        return layer(cls, tree, mapping)


@contextmanager
def located(path: str | Path, lines: Mapping[str, int]) -> Iterator[None]:
    """Have a ConfigError of the block name the file and line."""
    try:
        yield
    except ConfigError as error:
        line = f", line {lines[error.key]}" if error.key in lines else ""
        raise ConfigError(f"{path}{line}: {error}", error.key) from None


def fields_of(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return every field of a dataclass with its resolved type."""
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def plain(hint: Any) -> Any:
    """Return a type without what annotates it."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def variants(hint: Any) -> tuple[type, ...]:
    """Return the dataclasses of a field: several for a union, none for a value."""
    members = kinds(hint)
    return members if all(map(dataclasses.is_dataclass, members)) else ()


def by_name(section: tuple[type, ...]) -> dict[str, type]:
    """Return variants by their `name`."""
    return {defaults(cls)["name"]: cls for cls in section}


def unions(cls: type) -> dict[str, dict[str, type]]:
    """Return the variants of each section that has several."""
    found = {field.name: variants(hint) for field, hint in fields_of(cls)}
    return {name: by_name(members) for name, members in found.items() if len(members) > 1}


def unused(cls: type) -> set[str]:
    """Return the dotted keys that a config's command refuses (`cls.unused`)."""
    sections: Mapping[str, Collection[str]] = getattr(cls, "unused", {})
    return {f"{section}.{name}" for section, names in sections.items() for name in names}


def leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every used setting by its dotted key, of all variants."""
    found: dict[str, Any] = {}
    for field, hint in fields_of(cls):
        key = prefix + key_of(field.name)
        if not variants(hint):
            found[key] = hint
        for variant in variants(hint):
            found |= leaves(variant, f"{key}.")
    hidden = unused(cls)
    return {key: hint for key, hint in found.items() if key not in hidden}


def keys_named(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys with this last part, but for those that other libraries call otherwise."""
    return [key for key in keys if key.rpartition(".")[2] == name and not means_another(name, key)]


def command_of(cls: type) -> str:
    """Return what errors call the command of a config."""
    return cls.__name__.removesuffix("Config").lower()


def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults as nested plain values."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[key_of(field.name)] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            found[key_of(field.name)] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return found


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # The union is there because pydantic takes no config for a dataclass by itself.
    return TypeAdapter(typing.cast(Any, cls | None), config=ConfigDict(extra="forbid", strict=True))


def construct(cls: type[Config], tree: Mapping[str, Any], ignored: Sequence[str] = ()) -> Config:
    """Return the checked config of a tree; with `ignored` kinds of errors, perhaps None."""
    from pydantic import ValidationError

    try:  # as JSON, in which lists are tuples and mappings are dataclasses even if strict
        return _adapter(typing.cast(Any, cls)).validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] not in ignored:
                raise _explained(cls, problem) from None
        return typing.cast(Config, None)


def _explained(cls: type, problem: Mapping[str, Any]) -> ValueError:
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "value_error":
        return context["error"]
    keys: list[str] = []
    owner: type = cls
    hint: Any = cls
    for step in problem["loc"]:
        section = variants(hint)
        if len(section) > 1:
            hint = by_name(section)[step]
        elif section:
            keys.append(step)
            hints = {key_of(name): hint for name, hint in typing.get_type_hints(section[0]).items()}
            owner, hint = section[0], hints.get(step)
    key = ".".join(keys)
    if kind == "unexpected_keyword_argument":
        return _unknown_key(cls, owner, key, value)
    whole = kind == "string_type" and isinstance(value, Mapping)  # data: {train: {data_path: …}}
    if whole and (found := _foreign(cls, key, value)):
        return found
    if kind == "union_tag_invalid":
        key, value = f"{key}.name", context["tag"]
    if kind == "missing":
        message = "must be given: it has no default"
    elif "expected" in context or "expected_tags" in context:
        names = (context.get("expected") or context["expected_tags"]).replace("'", "")
        names = re.split(", | or ", names)
        message = f"must be one of {', '.join(names)}, but it is {value!r}"
        message += algorithm_hint(table()["values"].get(str(value), str(value)), names)
    elif variants(hint):
        remedy = (
            meaning_of(key, leaves(cls), command_of(cls)) or "write its keys below it, indented"
        )
        message = f"must be a section, but it is {value!r}: {remedy}"
    else:
        words = {"bool_type": "true or false", "tuple_type": "a list", "dict_type": "a mapping"}
        what = words.get(kind) or problem["msg"].partition("should be ")[2]
        message = f"must be {what}, but it is {value!r}{_remedy(kind, value, owner, key)}"
    return ConfigError(f"{key} {message}", key)


def _remedy(kind: str, value: Any, owner: type, key: str) -> str:
    name = key.rpartition(".")[2]
    if kind == "string_type":
        return f': write "{value}", with quotes' if isinstance(value, int | float) else ""
    if value in (None, "None", "none", "null"):
        if type(None) in kinds(typing.get_type_hints(owner)[name]):
            return ": write null"
        return ": write 0" if defaults(owner).get(name, ...) in (0, 0.0) else ""
    if isinstance(value, str) and re.fullmatch(r"[-+.\deE]+|true|false", value):
        return ": give it without quotes"
    if kind == "dict_type":
        return """: write one, such as '{"name": 0.5}'"""
    return f": write [{value}]" if kind == "tuple_type" else ""


def _unknown_key(cls: type, owner: type, key: str, value: Any) -> ConfigError:
    section, dot, name = key.rpartition(".")
    names, keys = [key_of(field.name) for field in dataclasses.fields(owner)], leaves(cls)
    if key in keys:
        hint = f": another {section}.name has it;"
    elif elsewhere := keys_named(name, keys):
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    else:
        if found := _foreign(cls, key, value):
            return found
        near = [f"{section}{dot}{each}" for each in names]
        hint = advice(key, keys, command=command_of(cls), near=near) or ";"
    of = " ".join(filter(None, [section, defaults(owner).get("name")]))
    listed = f"keys{f' of {of}' if of else ''}: {', '.join(names)}"
    return ConfigError(f"unknown key {key}{hint} {listed}", key)


def _foreign(cls: type, key: str, value: Any) -> ConfigError | None:
    for each in flat({key: value}):
        if meaning := meaning_of(each, leaves(cls), command_of(cls)):
            return ConfigError(f"unknown key {each}: {meaning}", each)
    return None

"""Settings as command-line flags: `--section.key` for each key, its docstring as help.

Defaults are those of one tree of values; of a union, only the variant that it names has flags.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import re
import shutil
import textwrap
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal

import tyro

from nemorl.runtime.config.spellings import advice, libraries, means_another
from nemorl.runtime.config.tree import (
    Setting,
    command_of,
    keys_named,
    kinds,
    leaves,
    nested,
    plain,
    unions,
    unused,
    walk,
)
from nemorl.runtime.config.yaml_io import ConfigError

MAIN = {"model": "model.path", "data": "data.train", "run": "run.dir", "dir": "run.dir"}
"""The setting that a section's name alone stands for, where the section is one."""

NO_SETTINGS = ("help", "config", "preset", "print_config", "trust_code")
"""Flags that a command may have besides."""


def parse_flags(
    cls: type[Any],
    tree: Mapping[str, Any],
    args: Sequence[str],
    *,
    prog: str,
    extra: Sequence[Setting] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `tree` with `args` laid over it, wrong types as texts, and the values of `extra`.

    Raises: SystemExit for bad flags.
    """
    selectors, fields = {f"{section}.name" for section in unions(cls)}, list[Any]()
    own = [each for each in walk(cls, tree) if not dataclasses.is_dataclass(each[1])]
    for key, hint, about, value in [*extra, *own]:
        flag = flag_of(key.removesuffix(".name") if key in selectors else key)
        hint = Annotated[hint, tyro.conf.arg(name=flag.removeprefix("--"), help=about)]
        usual: Any = (
            {} if value is ... else {"default_factory": functools.partial(copy.copy, value)}
        )
        fields.append((_field(key), hint, dataclasses.field(**usual)))
    flags = dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
    found = vars(tyro.cli(flags, prog=prog, args=args, registry=_REGISTRY))
    settings, others = ({key: found[_field(key)] for key, *_ in each} for each in (own, extra))
    return nested(settings), others


def _field(key: str) -> str:
    return key.replace(".", "__")


class _Lines(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]


def help_of(
    cls: type,
    tree: Mapping[str, Any],
    visible: Callable[[str], bool],
    *,
    prog: str,
    extra: Sequence[Setting],
    more: str,
    brief: bool,
) -> str:
    """Return the help of the `visible` settings and flags; if `brief`, two lines for each."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    form = functools.partial(_Lines, max_help_position=36, width=width)
    about = (inspect.getdoc(cls) or "").partition("\n\n" if brief else "\0")[0]
    usage = f"{prog} [OPTIONS]"
    parser: Any = argparse.ArgumentParser(prog, usage, about, more, formatter_class=form)
    groups, abouts, choices = {"": parser}, dict[str, str](), unions(cls)
    for key, hint, text, value in [*[(*each[:3], None) for each in extra], *walk(cls, tree)]:
        if dataclasses.is_dataclass(hint):
            abouts |= {} if key in choices else {key: text}
            continue
        if not visible(key):
            continue
        section, _, name = key.rpartition(".")
        if name == "name" and section in choices:
            key, members = section, choices[section].items()
            text = "\n".join(f"{each}: {inspect.getdoc(member)}" for each, member in members)
        section = "" if brief else section
        if section not in groups:
            groups[section] = parser.add_argument_group(section, abouts.get(section))
        markers = getattr(hint, "__metadata__", ())
        found = [marker for marker in markers if hasattr(marker, "aliases")]
        names = [*(each for marker in found for each in marker.aliases or ()), flag_of(key)]
        how: dict[str, Any] = {"metavar": _metavar(hint)}
        if tyro.conf.Positional in markers:
            names, how = [key], {"metavar": found[0].metavar if found else key.upper()}
        elif hint is bool:
            head, dot, last = names[-1].removeprefix("--").rpartition(".")
            names += [] if brief else [f"--{head}{dot}no-{last}"]
            how = {"action": "store_true"}
        usual = _hint(value)
        if brief:
            lines = 2 if sum(map(len, (*names, how.get("metavar", "")))) < 31 else 1
            text = textwrap.shorten(
                re.split(r"(?<=\.)\s(?!GRPO)", text)[0],
                lines * (width - 40) - len(usual),
                placeholder=" …",
            )
        text = f"{text} {usual}".strip().replace("%", "%%")
        groups[section].add_argument(*names, help=text, **how)
    return parser.format_help()


def names_of(cls: type) -> dict[str, str]:
    """Return the key of each name: a key, its last part where unique, a section."""
    keys = leaves(cls)
    times = Counter(map(_last, keys))
    return (
        {section: key for section, key in MAIN.items() if key in keys}
        | {
            last: key
            for key in keys
            if times[last := _last(key)] == 1 and not means_another(last, key)
        }
        | {key: key for key in keys}
        | {name: section for section in unions(cls) for name in (section, f"{section}.name")}
    )


def in_full(
    cls: type, args: Sequence[str], names: Mapping[str, str], *, lenient: bool = False
) -> list[str]:
    """Return the arguments with keys for names, and `--flag` for `--flag=true`.

    Raises ValueError for a flag that is not a setting, unless `lenient`.
    """
    full, rest, switches = list[str](), list(args), ("print_config", "trust_code")
    hints: dict[str, Any] = {**dict.fromkeys(switches, bool), **leaves(cls)}
    names = {**{name: name for name in switches}, **names}
    annotated = typing.get_type_hints(cls, include_extras=True)
    others = {*map(flag_of, NO_SETTINGS), "--"}
    for hint in annotated.values():
        for marker in getattr(hint, "__metadata__", ()):
            others |= {*(getattr(marker, "aliases", None) or ())}
    is_value = False
    while rest:
        argument = rest.pop(0)
        spelled, equals, value = argument.partition("=")
        section, dot, last = spelled.lstrip("-+").replace("-", "_").rpartition(".")
        name = f"{section}{dot}{last}"
        positive = f"{section}{dot}{last.removeprefix('no_')}"
        negated = bool(_words(hints.get(names.get(positive, "")))) and positive != name
        key = names.get(positive if negated else name)
        is_flag = spelled.startswith("--")
        if key is None or not is_flag:
            foreign = is_flag and spelled.replace("_", "-") not in others
            if not lenient and (foreign or (equals and (dot or key) and not is_value)):
                _refuse(cls, name, names, spelled, "" if is_flag else f" {value}")
            full.append(argument)
            is_value = argument.startswith("-") and not equals
            continue
        if words := _words(hints.get(key)):
            if not equals and rest and rest[0].lower() in words:
                equals, value = "=", rest.pop(0)
            if equals and value.lower() not in (words[:2] if negated else words):
                raise ConfigError(f"{key} must be {' or '.join(words)}, but it is {value!r}", key)
            if value.lower() not in words[2:]:
                negated, equals, value = negated != (value.lower() == "false"), "", ""
            if words[2:]:
                equals, value, negated = "=", value or ("false" if negated else "true"), False
        if tyro.conf.Positional in getattr(annotated.get(key), "__metadata__", ()):
            full += [value] if equals else rest[:1]
            rest = rest if equals else rest[1:]
            continue
        section, dot, last = flag_of(key).rpartition(".") if "." in key else ("--", "", key)
        full.append(f"{section}{dot}{'no-' * negated}{last.replace('_', '-')}{equals}{value}")
        is_value = not words and not equals
    return full


def _words(hint: Any) -> tuple[str, ...]:
    others = [
        Literal["null"] if kind is NoneType else kind for kind in kinds(hint) if kind is not bool
    ]
    if bool not in kinds(hint) or any(typing.get_origin(kind) is not Literal for kind in others):
        return ()
    return ("true", "false", *(word for kind in others for word in typing.get_args(kind)))


def _refuse(cls: type, name: str, names: Mapping[str, str], spelled: str, value: str) -> None:
    if name in names:
        keys = [names[name]]
    else:
        keys, last = keys_named(name, names), _last(name)
        theirs = any(name in each for each in libraries().values())
        if not keys and names.get(last) == last != name and not theirs:
            keys = [last]
    if keys:
        write = " or ".join(f"{flag_of(key)}{value}" for key in keys)
        raise ConfigError(f"unknown setting {spelled}: write {write}", name)
    hint = advice(
        name,
        [each for each, key in names.items() if "." in each or each == key],
        command=command_of(cls),
        near=[flag_of(each) for each in (*names, *NO_SETTINGS)],
        write=lambda key: f"{flag_of(names[key])}{value}",
    )
    if name in unused(cls):
        hint = f": {command_of(cls)} does not use it"
    if hint or spelled.startswith("--"):
        hint = hint or "; --help all lists the settings"
        raise ConfigError(f"unknown setting {spelled}{hint}", name)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def flag_of(key: str) -> str:
    """Return the flag of a key."""
    return f"--{key}".replace("_", "-")


def peek(args: Sequence[str], flag: str) -> list[str]:
    """Return the values that a flag will have; the last one counts."""
    found: list[str] = []
    for i, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found += [value] if equals else args[i + 1 : i + 2]
    return found


def given(args: Sequence[str], keys: Collection[str]) -> dict[str, str]:
    """Return the keys with a flag among arguments `in_full`, and the value after the last."""
    found = {}
    for key in keys:
        section, dot, last = key.rpartition(".")
        for flag in (flag_of(key), flag_of(f"{section}{dot}no-{last}")):
            if values := peek([*args, ""], flag):
                found[key] = values[-1]
    return found


def _hint(value: Any) -> str:
    if value is ...:
        return "(required)"
    if value in (None, "") or (not value and isinstance(value, list | tuple | dict)):
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f"(default: {value})"


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _setting(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Read a value as YAML has it (null, true, a number, {…}); the config checks its type."""
    append = tyro.conf.UseAppendAction in info.markers
    if info.type is bool or dataclasses.is_dataclass(info.type) or append:
        return None
    members = kinds(info.type)
    lists = [typing.get_args(kind)[0] for kind in members if typing.get_origin(kind) is tuple]
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*" if lists else 1,
        metavar=_metavar(info.type),
        instance_from_str=functools.partial(_read, members, lists),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _metavar(hint: Any) -> str:
    members = kinds(plain(hint))
    lists = [typing.get_args(kind)[0] for kind in members if typing.get_origin(kind) is tuple]
    if tyro.conf.UseAppendAction in getattr(hint, "__metadata__", ()):
        return _word(lists[0])
    words = "|".join(_word(kind) for kind in members if kind is not NoneType)
    return f"[{_word(lists[0])} ...]" if lists else words


def _read(members: Sequence[Any], lists: Sequence[Any], texts: list[str]) -> Any:
    if len(texts) == 1:
        one = _value(texts[0], members)
        if any(typing.get_origin(kind) is dict for kind in members) and texts[0][:1] == "{":
            with contextlib.suppress(ValueError):
                return json.loads(texts[0])
        if not lists or one is None or str in members:
            return one
    return tuple(_value(text, kinds(lists[0])) for text in texts)


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    return {bool: "{true,false}", str: "STR", int: "INT", float: "FLOAT"}.get(kind, "JSON")


def _value(text: str, members: Sequence[Any]) -> Any:
    if type(None) in members and text in ("null", "None"):
        return None
    if str in members:
        return text
    choices: dict[str, Any] = {"True": True, "False": False}
    for member in members:
        if typing.get_origin(member) is Literal:
            choices |= {str(choice): choice for choice in typing.get_args(member)}
    if text in choices:
        return choices[text]
    for read in (int, float, json.loads):
        with contextlib.suppress(ValueError):
            return read(text)
    return text

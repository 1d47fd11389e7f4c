"""Settings as command-line flags: `--section.key` for each key, its docstring as help.

Defaults are those of one tree of values; of a union, only the variant that it names has flags.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import shutil
import textwrap
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import NoneType
from typing import Any, Literal, NamedTuple

from nemorl.runtime.config.spellings import advice, in_a_table, means_another
from nemorl.runtime.config.tree import (
    by_name,
    command_of,
    defaults,
    field_docs,
    fields_of,
    key_of,
    kinds,
    leaves,
    unions,
    unused,
    variants,
)
from nemorl.runtime.config.yaml_io import ConfigError, flag_of

MAIN = {"model": "model.path", "data": "data.train", "run": "run.dir", "dir": "run.dir"}
"""The setting that a section's name alone stands for, where the section is one."""

NO_SETTINGS = ("help", "config", "preset", "print_config", "trust_code")
"""Flags that a command may have besides."""


class Flag(NamedTuple):
    """A setting, or another option of a command."""

    key: str
    hint: Any
    help: str
    value: Any = None
    """The default; `...`: it must be given."""
    marks: Mapping[str, Any] = {}
    """A field's metadata: `positional`, its name in the help; `short`, a short flag; `append`:
    it may be given several times.
    """


class _Lines(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]


def help_of(
    cls: type,
    tree: Mapping[str, Any],
    visible: Callable[[str], bool],
    *,
    prog: str,
    options: Sequence[Flag],
    more: str,
    brief: bool,
) -> str:
    """Return the help of the `visible` settings and of options; if `brief`, two lines for each."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    form = functools.partial(_Lines, max_help_position=36, width=width)
    about = (inspect.getdoc(cls) or "").partition("\n\n" if brief else "\0")[0]
    usage = f"{prog} [OPTIONS]"
    parser: Any = argparse.ArgumentParser(prog, usage, about, more, formatter_class=form)
    groups, selectors = {"": parser}, {f"{section}.name" for section in unions(cls)}
    abouts = {
        key_of(field.name): inspect.getdoc(hint) if dataclasses.is_dataclass(hint) else None
        for field, hint in fields_of(cls)
    }
    for key, hint, text, value, marks in [*options, *_flags_of(cls, tree)]:
        if not visible(key):
            continue
        section = "" if brief else key.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section, abouts[section])
        names = [flag_of(key.removesuffix(".name") if key in selectors else key)]
        names = [marks["short"], *names] if "short" in marks else names
        how: dict[str, Any] = {"metavar": marks.get("positional") or _metavar(hint, marks)}
        if "positional" in marks:
            names = [key]
        elif hint is bool:
            head, dot, last = names[-1].removeprefix("--").rpartition(".")
            names += [] if brief else [f"--{head}{dot}no-{last}"]
            how = {"action": "store_true"}
        usual = _hint(value)
        if brief:
            lines = 2 if sum(map(len, (*names, how.get("metavar", "")))) < 31 else 1
            first = re.split(r"(?<=\.)\s(?!GRPO)", text)[0]
            text = textwrap.shorten(first, lines * (width - 40) - len(usual), placeholder=" …")
        text = f"{text} {usual}".strip().replace("%", "%%")
        groups[section].add_argument(*names, help=text, **how)
    return parser.format_help()


def _flags_of(cls: type, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Flag]:
    """Yield the flag of each setting with its value in `tree`, of a union those of its variant."""
    docs, tree = field_docs(cls), {**defaults(cls), **tree}
    for field, hint in fields_of(cls):
        key, value = f"{prefix}{key_of(field.name)}", tree.get(key_of(field.name), ...)
        section = variants(hint)
        if not section:
            yield Flag(key, hint, docs.get(field.name, ""), value, field.metadata)
        elif len(section) == 1:
            yield from _flags_of(section[0], value, f"{key}.")
        else:
            members = by_name(section)
            lines = [f"{each}: {inspect.getdoc(member)}" for each, member in members.items()]
            yield Flag(f"{key}.name", Literal[tuple(members)], "\n".join(lines), value["name"])
            others = _flags_of(members[value["name"]], value, f"{key}.")
            yield from (each for each in others if each.key != f"{key}.name")


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


def read_flags(cls: type, args: Sequence[str], *, lenient: bool = False) -> dict[str, list[str]]:
    """Return the texts that arguments give for each key; of a flag given again, the later ones.

    Raises: ValueError for what is not a setting, unless `lenient`.
    """
    switches = dict.fromkeys(("print_config", "trust_code"), bool)
    hints: dict[str, Any] = {**switches, **leaves(cls)}
    names = {**{name: name for name in NO_SETTINGS}, **names_of(cls)}
    marks = {field.name: field.metadata for field in dataclasses.fields(cls)}
    aliases = {each["short"]: flag_of(name) for name, each in marks.items() if "short" in each}
    aliases["-h"] = "--help"
    places = [name for name, each in marks.items() if "positional" in each]
    appends = {"config", *(name for name, each in marks.items() if "append" in each)}
    found, rest = dict[str, list[str]](), list(args)
    while rest:
        argument = rest.pop(0)
        spelled, equals, value = argument.partition("=")
        spelled = aliases.get(spelled, spelled)
        section, dot, last = spelled.lstrip("-+").replace("-", "_").rpartition(".")
        name = f"{section}{dot}{last}"
        positive = f"{section}{dot}{last.removeprefix('no_')}"
        negated = positive != name and bool(_words(hints.get(names.get(positive, ""))))
        key, is_flag = names.get(positive if negated else name), spelled.startswith("--")
        if key is None or not is_flag:
            if not lenient and (is_flag or (equals and (dot or key))):
                _refuse(cls, name, names, spelled, "" if is_flag else f" {value}")
            if places and not is_flag:
                several = _item(hints[places[0]]) is not None
                key = places[0] if several else places.pop(0)
                found[key] = [*found.get(key, ()), argument]
            elif not lenient:
                raise ConfigError(f"unknown argument {argument!r}: a setting begins with --")
            continue
        if words := _words(hints.get(key)):
            if not equals and rest and rest[0].lower() in words:
                equals, value = "=", rest.pop(0)
            if equals and value.lower() not in (words[:2] if negated else words):
                raise ConfigError(f"{key} must be {' or '.join(words)}, but it is {value!r}", key)
            texts = [value.lower()]
            if texts[0] not in words[2:]:
                texts = ["true" if negated == (texts[0] == "false") else "false"]
        elif equals:
            texts = [value]
        else:
            texts = list(takewhile(lambda each: each[:2] != "--" and each not in aliases, rest))
            if key in appends or _item(hints.get(key)) is None:
                texts = texts[:1]
                if not texts and key != "help":
                    if lenient:
                        continue
                    raise ConfigError(f"{key} must have a value: write {flag_of(key)}=VALUE", key)
            rest = rest[len(texts) :]
        found[key] = found.get(key, []) + texts if key in appends else texts
    return found


def with_flags(
    cls: type[Any], tree: Mapping[str, Any], given: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return `tree` with what `read_flags` returned laid over it, wrong types as texts.

    Raises: ConfigError where a setting without a default is not given.
    """
    result = {key: dict(each) if isinstance(each, Mapping) else each for key, each in tree.items()}
    for key, hint, _, value, marks in _flags_of(cls, tree):
        section, _, name = key.rpartition(".")
        if key in given:
            (result[section] if section else result)[name] = _read(hint, given[key])
        elif value is ...:
            what = marks.get("positional") or f"{flag_of(key)} {_metavar(hint, marks)}"
            raise ConfigError(f"{key} must be given: add {what}", key)
    return result


def _words(hint: Any) -> tuple[str, ...]:
    others = [kind for kind in kinds(hint) if kind is not bool]
    others = [Literal["null"] if kind is NoneType else kind for kind in others]
    if bool not in kinds(hint) or any(typing.get_origin(kind) is not Literal for kind in others):
        return ()
    return ("true", "false", *(word for kind in others for word in typing.get_args(kind)))


def _refuse(cls: type, name: str, names: Mapping[str, str], spelled: str, value: str) -> None:
    if name in names:
        keys = [names[name]]
    else:
        keys = [key for key in names if _last(key) == name and not means_another(name, key)]
        last = _last(name)
        if not keys and names.get(last) == last != name and not in_a_table(name):
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


def _item(hint: Any) -> Any:
    """Return the type of a list's items, None for what is no list."""
    lists = [typing.get_args(kind)[0] for kind in kinds(hint) if typing.get_origin(kind) is tuple]
    return lists[0] if lists else None


def _metavar(hint: Any, marks: Mapping[str, Any]) -> str:
    item = _item(hint)
    if item is None:
        return "|".join(_word(kind) for kind in kinds(hint) if kind is not NoneType)
    return _word(item) if "append" in marks else f"[{_word(item)} ...]"


def _read(hint: Any, texts: list[str]) -> Any:
    """Return a value as YAML has it (null, true, a number, {…}); the config checks its type."""
    members, item = kinds(hint), _item(hint)
    if len(texts) == 1:
        one = _value(texts[0], members)
        if item is None or one is None or str in members:
            return one
    return tuple(_value(text, kinds(item)) for text in texts)


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    return {bool: "{true,false}", str: "STR", int: "INT", float: "FLOAT"}.get(kind, "JSON")


def _value(text: str, members: Sequence[Any]) -> Any:
    if type(None) in members and text in ("null", "None"):
        return None
    if str in members:
        return text
    known = {
        str(choice): choice
        for member in members
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    }
    if bool in members:
        known |= {"true": True, "True": True, "false": False, "False": False}
    if text in known:
        return known[text]
    readers: list[Callable[[str], Any]] = [int, float] if {int, float} & {*members} else []
    if any(typing.get_origin(member) is dict for member in members):
        readers.append(json.loads)
    for read in readers:
        with contextlib.suppress(ValueError):
            return read(text)
    return text

"""Settings as command-line flags: `--section.key` for each key, its docstring as help.

The parser is made for one tree of values, which --help shows as defaults; of a union, only the
variant that the tree names has flags. The result is a tree again.
"""

import copy
import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
from docstring_parser import parse_from_object

from nemorl.runtime.config.tree import by_name, defaults, to_dict, variants

Extra = tuple[str, Any, Any, str]
"""A flag that is no setting: name, type, default and help."""


def parse_flags(
    cls: type[Any],
    tree: Mapping[str, Any],
    args: Sequence[str],
    *,
    prog: str,
    extra: Sequence[Extra] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree with the flags of `args` laid over it, and the values of `extra`.

    --help and bad flags raise SystemExit.
    """
    options = [
        (
            name,
            Annotated[hint, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff],
            dataclasses.field(default=default, metadata={"help": text}),
        )
        for name, hint, default, text in extra
    ]
    settings = _with_defaults(cls, tree)
    flags = dataclasses.make_dataclass(
        cls.__name__,
        [*options, ("settings", Annotated[settings, tyro.conf.arg(name="")])],
        kw_only=True,
    )
    found: Any = tyro.cli(
        flags, prog=prog, args=args, description=inspect.getdoc(cls), registry=_REGISTRY
    )
    return to_dict(found.settings), {name: getattr(found, name) for name, *_ in extra}


def peek(args: Sequence[str], flag: str) -> str | None:
    """Return the value that a flag will have, before there is a parser; the last one counts.

    >>> peek(["--loss.clip-low", "0.1", "--loss=gspo"], "--loss")
    'gspo'
    """
    found = None
    for i, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(args[i + 1 : i + 2]), None)
    return found


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, as one line."""
    return {
        field.arg_name: " ".join((field.description or "").split())
        for base in reversed(cls.__mro__[:-1])
        for field in parse_from_object(base).params
    }


def _with_defaults(
    cls: type, tree: Mapping[str, Any], members: Mapping[str, type] | None = None
) -> type:
    """Return a subclass of `cls` that has the values of `tree` as defaults, and no checks.

    `members`: the variants of a union by name, which --loss chooses.
    """
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    tree, fields = defaults(cls) | dict(tree), []
    for name in (field.name for field in dataclasses.fields(cls)):
        hint, about = hints[name], docs.get(name, "")
        value: Any = tree.get(name)
        markers = getattr(hint, "__metadata__", ())
        section = variants(hint.__origin__ if markers else hint)
        if section:
            names = by_name(section) if len(section) > 1 else None
            value = _with_defaults(names[value["name"]] if names else section[0], value, names)
            hint = Annotated[(value, *markers)] if markers else value
            about = f"{inspect.getdoc(value)} {about}"
        elif members and name == "name":
            text = "\n".join(
                f"{each}: {inspect.getdoc(member)}" for each, member in members.items()
            )
            hint = Annotated[Literal[tuple(members)], tyro.conf.arg(name="", help=text)]
        elif isinstance(value, list):
            value = tuple(value)
        options: dict[str, Any] = {"metadata": {"help": about}}
        if name in tree:
            factory = value if section else functools.partial(copy.copy, value)
            options["default_factory"] = factory
        fields.append((name, hint, dataclasses.field(**options)))
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        bases=(cls,),
        kw_only=True,
        frozen=True,
        namespace={"__post_init__": lambda self: None, "__doc__": cls.__doc__},
    )


def _mapping(arguments: list[str]) -> dict[str, Any]:
    value = json.loads(arguments[0])
    if not isinstance(value, dict):
        raise ValueError(f"it must be a JSON object, got {arguments[0]}")
    return value


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _json(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Read a mapping: --model.chat-template-kwargs '{"enable_thinking": false}'."""
    if typing.get_origin(info.type) is not dict:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_mapping,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )

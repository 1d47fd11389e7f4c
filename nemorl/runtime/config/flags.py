"""Config dataclasses as command-line flags: one flag per key, `--section.key`, with the key's
docstring as its help.

The parser is made for one complete tree of values (see config_io): they are the defaults that
--help shows, and the variant that a union holds there is the one whose flags exist. What comes back
is a tree again, so that checks across fields see file and flags together.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_origin

import tyro

from nemorl.runtime.config.tree import by_name, fields_of, to_dict, variants

Extra = tuple[str, Any, Any, str]
"""A flag besides the config's own: name, type, default and help."""


def parse_flags(
    cls: type[Any],
    tree: Mapping[str, Any],
    args: Sequence[str],
    *,
    prog: str,
    extra: Sequence[Extra] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree with the flags of `args` laid over it, and the values of `extra`. --help and bad
    flags end in SystemExit, as in argparse.
    """
    flags = _flag_class(cls, tree, extra)
    values = to_dict(
        tyro.cli(flags, prog=prog, args=_plain_booleans(cls, args), description=inspect.getdoc(cls))
    )
    return values, {name: values.pop(name) for name, *_ in extra}


def peek(args: Sequence[str], flag: str) -> str | None:
    """The value that a flag will have, before there is a parser; the last one counts.

    >>> peek(["--loss.clip-low", "0.1", "--loss=gspo"], "--loss")
    'gspo'
    """
    found = None
    for i, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if _spelling(name) == flag:
            found = value if equals else next(iter(args[i + 1 : i + 2]), None)
    return found


def unions(cls: type[Any]) -> dict[str, dict[str, type]]:
    """The sections of which there are several variants, by name."""
    return {
        field.name: by_name(variants(hint))
        for field, hint in fields_of(cls)
        if len(variants(hint)) > 1
    }


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass (or of one that it derives from) that stands at
    the top of its module.
    """
    return {
        name: text
        for base in reversed(cls.__mro__[:-1])
        for name, text in _module_docs(base.__module__).get(base.__name__, {}).items()
    }


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    docs: dict[str, dict[str, str]] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # typed in, as in a notebook
        return docs
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = docs.setdefault(node.name, {})
            for statement, following in itertools.pairwise(node.body):
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and isinstance(following, ast.Expr)
                ):
                    fields[statement.target.id] = " ".join(
                        str(ast.literal_eval(following.value)).split()
                    )
    return docs


def _flag_class(
    cls: type[Any],
    tree: Mapping[str, Any],
    extra: Sequence[Extra] = (),
    *,
    about: str = "",
    members: Mapping[str, type] | None = None,
) -> type:
    """A dataclass like `cls`, without its checks and unions, whose defaults are the values of
    `tree`.
    """
    docs = field_docs(cls)
    fields: list[Any] = [
        (
            name,
            _annotate(hint, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
            dataclasses.field(default=default, metadata={"help": text}),
        )
        for name, hint, default, text in extra
    ]
    for field, hint in fields_of(cls):
        section = variants(hint)
        if section:
            value = tree[field.name]
            alternatives = unions(cls).get(field.name)
            inner = _flag_class(
                alternatives[value["name"]] if alternatives else section[0],
                value,
                about=docs.get(field.name, ""),
                members=alternatives,
            )
            fields.append(
                (
                    field.name,
                    _styled(inner, field.metadata),
                    dataclasses.field(default_factory=inner, metadata={"help": inner.__doc__}),
                )
            )
        elif members and field.name == "name":
            # The flag of a union's name is the section itself: --loss gspo.
            selector = _annotate(cast(Any, Literal)[tuple(members)], tyro.conf.arg(name=""))
            text = "\n".join(
                f"{name}: {inspect.getdoc(member)}" for name, member in members.items()
            )
            fields.append(
                ("name", selector, dataclasses.field(default=tree["name"], metadata={"help": text}))
            )
        else:
            options: dict[str, Any] = {"metadata": {"help": docs.get(field.name, "")}}
            if field.name in tree:
                value = tree[field.name]
                if isinstance(value, dict):
                    options["default_factory"] = functools.partial(dict, value)
                else:
                    options["default"] = tuple(value) if isinstance(value, list) else value
            styled = (
                _annotate(hint, _JSON)
                if get_origin(hint) is dict
                else _styled(hint, field.metadata)
            )
            fields.append((field.name, styled, dataclasses.field(**options)))
    doc = " ".join(filter(None, [inspect.getdoc(cls), about]))
    return dataclasses.make_dataclass(
        cls.__name__, fields, kw_only=True, frozen=True, namespace={"__doc__": doc}
    )


def _mapping(arguments: list[str]) -> dict[str, Any]:
    value = json.loads(arguments[0])
    if not isinstance(value, dict):
        raise ValueError(f"it must be a JSON object, got {arguments[0]}")
    return value


_JSON = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_mapping,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)
"""How a mapping is given: --model.chat-template-kwargs '{"enable_thinking": false}'."""


def _styled(hint: Any, metadata: Mapping[str, Any]) -> Any:
    """What a command's config says about its flags: a short alias, repetition, a section without
    prefix.
    """
    if "alias" in metadata:
        return _annotate(hint, tyro.conf.arg(aliases=(metadata["alias"],)))
    if metadata.get("positional"):
        return _annotate(hint, tyro.conf.Positional)
    if metadata.get("append"):
        return _annotate(hint, tyro.conf.UseAppendAction)
    return _annotate(hint, tyro.conf.OmitArgPrefixes) if metadata.get("flat") else hint


def _annotate(hint: Any, *markers: Any) -> Any:
    return cast(Any, Annotated)[(hint, *markers)]


def _plain_booleans(cls: type[Any], args: Sequence[str]) -> list[str]:
    """`--run.resume True` and `--run.resume=true` as the flags that they mean: --run.resume or
    --run.no-resume.
    """
    negations = dict(_negations(cls))
    result: list[str] = []
    for argument in args:
        flag, equals, value = argument.partition("=")
        if (
            not equals
            and result
            and _spelling(result[-1]) in negations
            and argument.lower() in ("true", "false")
        ):
            flag, value = result.pop(), argument
        if _spelling(flag) in negations and value.lower() in ("true", "false"):
            argument = flag if value.lower() == "true" else negations[_spelling(flag)]
        result.append(argument)
    return result


def _negations(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for field, hint in fields_of(cls):
        for member in variants(hint):
            yield from _negations(
                member,
                "" if field.metadata.get("flat") else f"{prefix}{field.name}.".replace("_", "-"),
            )
        if hint is bool:
            name = field.name.replace("_", "-")
            yield f"--{prefix}{name}", f"--{prefix}no-{name}"


def _spelling(flag: str) -> str:
    """--print_config is --print-config."""
    return flag.replace("_", "-") if flag.startswith("--") else flag

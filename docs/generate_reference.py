"""Write docs/configuration.md from the config dataclasses: python docs/generate_reference.py."""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.flags import field_docs
from nemorl.runtime.config.tree import ALIASES, by_name, dotted_keys, fields_of, to_dict, variants
from nemorl.runtime.start.registry import ALGORITHMS

PAGE = Path(__file__).parent / "configuration.md"
INTRODUCTION = """\
# Every setting

*Written by `python docs/generate_reference.py` from the dataclasses; change it there.*

A setting is a key in YAML (`optimizer: {lr: 1e-6}`), a flag (`--optimizer.lr 1e-6`), a field in
Python (`OptimizerConfig(lr=1e-6)`) and an argument of `nemorl.train` (`lr=1e-6`, or
`optimizer__lr=1e-6` if the name alone is not unique). Later layers win: defaults, then `--preset`,
then `--config`, then flags. `--print-config` shows what a run would use. Sections that several
algorithms share come first. A flag of true or false is `--run.resume` or `--run.no-resume`.

A choice between variants, such as `loss`, is a section with a `name`: `loss: {name: gspo}`,
`--loss gspo`. It has only the keys of the chosen variant.
"""


def page() -> str:
    """The whole page."""
    configs = {
        name: algorithm.config
        for name, algorithm in ALGORITHMS.items()
        if algorithm.config.__module__.startswith("nemorl.")
    }
    shared = {field.name: hint for field, hint in fields_of(BaseConfig)}
    parts = [INTRODUCTION]
    for name, hint in shared.items():
        parts.append(section(f"## `{name}`", name, hint))
    for name, cls in configs.items():
        parts.append(f"## `nemorl {name}`\n\n{about(cls)}\n")
        own = [(field, hint) for field, hint in fields_of(cls) if field.name not in shared]
        values = [(field, hint) for field, hint in own if not variants(hint)]
        parts.append(table(cls, values, ""))
        parts += [
            section(f"### `{field.name}`", field.name, hint)
            for field, hint in own
            if variants(hint)
        ]
    parts.append(
        "## Other spellings\n\nIn YAML and in `nemorl.train` these names are accepted, too; most"
        " are NeMo RL's.\n"
    )
    parts.append(aliases(list(configs.values())))
    lines = "\n".join(parts).split("\n")
    return "\n".join(
        line if line.startswith("|") else textwrap.fill(line, 100, break_on_hyphens=False)
        for line in lines
    )


def section(title: str, name: str, hint: Any) -> str:
    members = variants(hint)
    if len(members) == 1:
        keys = table(members[0], fields_of(members[0]), f"{name}.")
        return f"{title}\n\n{about(members[0])}\n\n{keys}"
    parts = [f"{title}\n\nOne of {', '.join(f'`{variant}`' for variant in by_name(members))}.\n"]
    for variant, cls in by_name(members).items():
        own = [(field, hint) for field, hint in fields_of(cls) if field.name != "name"]
        parts.append(
            f"**`{variant}`**: {about(cls)}\n\n" + (table(cls, own, name + ".") if own else "")
        )
    return "\n".join(parts)


def about(cls: type) -> str:
    """The docstring of a class, a line per paragraph."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(cls) or "")


def table(cls: type, fields: list[tuple[dataclasses.Field[Any], Any]], prefix: str) -> str:
    docs = field_docs(cls)
    rows = (
        f"| `{prefix}{field.name}` | {kind(hint)} | {default(field)} |"
        f" {cell(docs.get(field.name, ''))} |"
        for field, hint in fields
    )
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def kind(hint: Any) -> str:
    """A type as people say it."""
    words: dict[Any, str] = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        type(None): "null",
        typing.Any: "any",
    }
    if hint in words:
        return words[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {kind(arguments[0])}"
    if origin in (dict, typing.get_origin(typing.Mapping[str, Any])):
        return "mapping"
    return " or ".join(kind(argument) for argument in arguments)


def default(field: dataclasses.Field[Any]) -> str:
    """The default as YAML has it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "needed"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    value = to_dict(value) if dataclasses.is_dataclass(value) else value
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else ""


def aliases(configs: list[type]) -> str:
    known = {key for cls in configs for key, own in dotted_keys(cls).items() if own}
    rows: Iterator[str] = (
        f"| `{alias}` | `{target}` |"
        for alias, target in sorted(ALIASES.items())
        if target in known
    )
    return "\n".join(["| spelling | setting |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

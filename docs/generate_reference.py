"""Write docs/configuration.md from the config dataclasses, and the tables of docs/coming-from.md:
python docs/generate_reference.py.
"""

import dataclasses
import inspect
import re
import textwrap
import typing
from pathlib import Path
from typing import Any, Literal

from nemorl.runtime.cli.commands import COMMANDS
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.spellings import libraries, settings_in
from nemorl.runtime.config.tree import (
    by_name,
    field_docs,
    fields_of,
    key_of,
    leaves,
    to_dict,
    variants,
)
from nemorl.runtime.run.registry import ALGORITHMS

PAGE = Path(__file__).parent / "configuration.md"
MIGRATION = Path(__file__).parent / "coming-from.md"
INTRODUCTION = """\
# Every setting

*Written by `python docs/generate_reference.py` from the dataclasses; `--help SECTION` says more.*

A setting is a key in YAML (`optimizer: {lr: 1e-6}`), a flag (`--optimizer.lr 1e-6`), a field in
Python (`OptimizerConfig(lr=1e-6)`) and an argument of `nemorl.train` (`lr=1e-6`, or
`optimizer__lr=1e-6` if the name alone is not unique, or `optimizer={"lr": 1e-6}`). As `async` is a
word of Python's, that section is `async_` there: `async_={"max_staleness": 1}`, or
`async__max_staleness=1`. The last part of a name is enough for a flag, too, where it is unique
(`--lr 1e-6`), and `--model`, `--data` and `--run` are short for `--model.path`, `--data.train` and
`--run.dir`.

Later layers win: defaults, then `--preset`, then `--config` (of several the later one), then flags.
`--print-config` writes what a run would use as a file for `--config`. Code that a file names runs
only if a flag names it, too, or with `--trust-code`
([extending.md](extending.md#code-that-files-name)). A flag of true or false is `--run.export` or
`--run.no-export`; `null` is a value (`--gap.warn null`). A choice between variants, such as `loss`,
is a section with a `name`: `loss: {name: gspo}`, `--loss gspo`. It has only the keys of the chosen
variant. Behind each name is its default, if it has one; shared sections come first.
"""


def page() -> str:
    """The whole page."""
    configs = {
        name: algorithm.config
        for name, algorithm in ALGORITHMS.items()
        if algorithm.config.__module__.startswith("nemorl.")
    }
    shared = {field.name: hint for field, hint in fields_of(BaseConfig)}
    parts, places = [INTRODUCTION], dict[str, str]()
    for name, hint in shared.items():
        parts.append(section(f"## `{name}`", name, hint))
    for name, cls in configs.items():
        parts.append(f"## `nemorl {name}`\n\n{about(cls)}\n")
        own = [(field, hint) for field, hint in fields_of(cls) if field.name not in shared]
        values = [(field, hint) for field, hint in own if not variants(hint)]
        parts.append(table(cls, values, ""))
        alike = dict[str, list[str]]()
        for key, hint in ((key_of(field.name), hint) for field, hint in own if variants(hint)):
            if (
                place := places.setdefault(text := section(f"### `{key}`", key, hint), name)
            ) == name:
                parts.append(text)
            else:
                alike.setdefault(place, []).append(f"`{key}`")
        parts += [f"{', '.join(keys)}: as of `nemorl {one}`.\n" for one, keys in alike.items()]
    lines = re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).split("\n")
    return "\n".join(
        textwrap.fill(
            line, 100, break_on_hyphens=False, subsequent_indent="  " if line[:2] == "- " else ""
        )
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
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def table(cls: type, fields: list[tuple[dataclasses.Field[Any], Any]], prefix: str) -> str:
    docs = field_docs(cls)
    rows = (
        f"- `{prefix}{field.name}` {default(field)}: {brief(docs.get(field.name, ''))}"
        f"{choices(hint)}".replace(" :", ":")
        for field, hint in fields
    )
    return "\n".join(rows) + "\n"


def brief(text: str) -> str:
    """The first clause of a field's description."""
    plain = re.sub(r" \([^()]*\)", "", " ".join(text.split()))
    first = re.split(r"(?<=\.)\s+(?=[A-Z0-9])|;\s", plain)[0]
    return re.split(r", (?:such as|which|of which|so that|as|where|because|while) ", first)[
        0
    ].rstrip(".")


def choices(hint: Any) -> str:
    """The values of a setting that has only a few."""
    for one in (hint, *typing.get_args(hint)):
        if typing.get_origin(one) is Literal:
            return ": " + ", ".join(f"`{value}`" for value in typing.get_args(one))
    return ""


def default(field: dataclasses.Field[Any]) -> str:
    """The default as YAML has it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "needed"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    value = to_dict(value) if dataclasses.is_dataclass(value) else value
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else ""


def migration(text: str) -> str:
    """coming-from.md with its tables generated again; of NeMo RL, whose files are translated whole,
    the names that need no words.
    """
    commands = [*ALGORITHMS.values(), *COMMANDS.values()]
    known = {key for command in commands for key in leaves(command.config)}
    for library, names in libraries().items():
        meanings = dict[str, list[str]]()
        for theirs, ours in names.items():
            if library != "NeMo RL" or ours in known:
                meanings.setdefault(ours, []).append(f"`{theirs}`")
        rows = (f"{' '.join(them)} | {cell_of(ours, known)}\n" for ours, them in meanings.items())
        before, head, after = text.partition(f"{library} | nemorl\n--- | ---\n")
        text = (
            before + head + ("".join(rows) + re.sub(r"\A(`.* \| .*\n)*", "", after) if head else "")
        )
    return text


def cell_of(ours: str, known: set[str]) -> str:
    """A cell with its settings as code, and its page as a link."""
    for key in sorted({*settings_in(ours)} & known, key=len, reverse=True):
        ours = re.sub(rf"(?<![\w.`/]){re.escape(key)}(?![\w.`])", f"`{key}`", ours)
    return re.sub(r"\(docs/([\w-]+\.md)\)", r"([\1](\1))", ours)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    MIGRATION.write_text(migration(MIGRATION.read_text(encoding="utf-8")), encoding="utf-8")

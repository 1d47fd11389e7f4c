"""Translate a NeMo RL configuration (GRPO, SFT or DPO): python tools/from_nemo_rl.py FILE > OURS.

Follows `defaults` and ${references}, walks nemorl/runtime/config/coming_from.toml, and prints our
YAML with what trains differently as comments. A file with a key that would change what is trained,
and that has nothing like it here, is refused.
"""

import os
import re
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, TemplateError, Undefined

from nemorl.checks import require
from nemorl.runtime.config.spellings import libraries, table
from nemorl.runtime.config.tree import flat, from_dict, nested
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.start.registry import ALGORITHMS

RULES = table()["importer"]
JINJA = Environment(undefined=ChainableUndefined)
REFERENCE = re.compile(r"\$\{([^${}]+)\}")
REPLACED = ("policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler")
"""Sections in whose place megatron_cfg has its own."""


def read_whole(path: Path) -> dict[str, Any]:
    """Return a file laid over its `defaults`."""
    tree, _ = read(path)
    parents = tree.pop("defaults", None) or []
    for parent in [parents] if isinstance(parents, str) else reversed(parents):
        tree = laid_over(read_whole(path.parent / parent), tree)
    return tree


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return one tree laid over another; a section with `_override_` takes nothing from below."""
    if over.get("_override_"):
        return dict(over)
    both = [key for key in over if all(isinstance(each.get(key), Mapping) for each in (base, over))]
    return {**base, **over, **{key: laid_over(base[key], over[key]) for key in both}}


def resolved(value: Any, tree: Mapping[str, Any], section: str = "") -> Any:
    """Return a value with its ${references} replaced, innermost first."""
    if isinstance(value, Mapping):
        return {key: resolved(each, tree, f"{section}{key}.") for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, tree, section) for each in value]
    match = REFERENCE.search(value) if isinstance(value, str) else None
    if match is None:
        return value
    found = meant(match[1].strip(), tree, section)
    return resolved(found if match[0] == value else value.replace(match[0], str(found)), tree)


def meant(reference: str, tree: Mapping[str, Any], section: str) -> Any:
    """Return the value of a.b, .sibling, oc.env:NAME, mul:x,y or div:x,y."""
    how, _, rest = reference.rpartition(":")
    if how == "oc.env":
        return os.environ.get(rest, f"/{rest}")
    if how:
        left, right = map(float, rest.split(","))
        result = left * right if how == "mul" else left / right
        return int(result) if result.is_integer() else result
    key = f"{section.rpartition('.')[0].rpartition('.')[0]}{rest}" if rest[0] == "." else rest
    for part in key.strip(".").split("."):
        tree = tree[part]
    return tree


def prompt_text(file: str | None, recipe: Path) -> Any:
    """Return the text of a file in the recipe's folder, or in the folder examples that it is in."""
    if not file:
        return Undefined()
    here = recipe.resolve().parent
    for folder in (here, *(each.parent for each in here.parents if each.name == "examples")):
        found = (folder / file).resolve()
        inside = found.is_relative_to(here) or found.is_relative_to(folder / "examples")
        if inside and found.is_file():
            return found.read_text(encoding="utf-8")
    raise ValueError(f"no file {file} beside the recipe: remove it, and set data.prompt_template")


def prompt_template(file: str | None, recipe: Path) -> Any:
    """Return a text with {prompt} for {}."""
    text = prompt_text(file, recipe)
    return re.sub(r"(?<!\{)\{0?\}(?!\})", "{prompt}", text) if isinstance(text, str) else text


def translate(path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the algorithm, our settings by dotted key, and notes; raise ValueError with the reason
    of each key for which a file is refused.
    """
    tree = read_whole(path)
    named = [name for name in ("grpo", "sft", "dpo") if name in tree]
    require(len(named) == 1, str(path), "must hold one of grpo, sft, dpo", [*tree], "choose one")
    tree = resolved(tree, tree)
    names: dict[str, Any] = {"algorithm": named[0], "this": tree[named[0]], "search": re.search}
    names |= {"datasets": RULES["datasets"], "text": lambda file: prompt_text(file, path)}
    names |= {"template": lambda file: prompt_template(file, path), **tree}

    def value_of(expression: str, **more: Any) -> Any:
        return JINJA.compile_expression(expression, undefined_to_none=False)(**names, **more)

    for name, expression in RULES["let"].items():
        names[name] = value_of(expression)
    ours = {key: value_of(expression) for key, expression in RULES["settings"].items()}
    ours = {key: value for key, value in ours.items() if not isinstance(value, Undefined)}
    notes, refused, ignored = list[str](), list[str](), list[str]()
    theirs, plain = flat(tree), libraries()["NeMo RL"]
    for key, value in theirs.items():
        if (names["megatron"] and key.startswith(REPLACED)) or switched_off(key, theirs):
            continue
        on, limited = value not in (None, False, 0, "", [], {}), False
        for patterns, limit in RULES["limits"].items():
            if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
                limited, same = True, value in limit.get("same", ())
                odd = not same and (on or True in limit.get("same", ()))
                if odd and value_of(limit.get("when", "true"), x=value, key=key):
                    found = refused if "refuse" in limit else notes
                    found.append(f"{key} {value!r}: {limit.get('refuse') or limit['note']}")
        meaning = plain.get(key, "")
        if value is not None and meaning and meaning == meaning.split()[0].rstrip(":,"):
            ours[meaning] = value
        elif any(fnmatchcase(key, pattern) for pattern in RULES["ignored"]):
            ignored += [key] if on and not limited and not meaning else []
        elif on and not limited and not meaning and not mentioned(key):
            refused.append(f"{key} {value!r}: no such key is known: remove it")
    if refused:
        raise ValueError("; ".join(refused))
    from_dict(ALGORITHMS[named[0]].config, nested(ours))
    return named[0], ours, [*notes, f"without a meaning here: {', '.join(ignored) or 'nothing'}"]


def mentioned(key: str) -> bool:
    """Return whether an expression reads a key, or a section that it is in."""
    read = " ".join([*RULES["let"].values(), *RULES["settings"].values()])
    return any(f"{key}.".startswith(f"{each}.") for each in re.findall(r"[a-z]\w*(?:\.\w+)+", read))


def switched_off(key: str, theirs: Mapping[str, Any]) -> bool:
    """Return whether `enabled` of a section that a key is in is off."""
    parts = key.split(".")
    switches = {".".join([*parts[:depth], "enabled"]) for depth in range(1, len(parts))}
    return any(theirs.get(each, 1) in (False, None) for each in switches - {key, "checkpointing.enabled"})


def as_yaml(path: Path) -> str:
    """Return the translation of a file as YAML, with its notes as comments at the end."""
    try:
        algorithm, ours, notes = translate(path)
    except (ArithmeticError, LookupError, RecursionError, TemplateError, TypeError) as error:
        raise ValueError(f"must be as in NeMo RL's own files ({error!r}): correct it") from error
    head = f"# nemorl {algorithm} --config THIS_FILE, from {str(path)!r} of NeMo RL\n"
    return head + dump(nested(ours)) + "".join(f"# {ascii(note)[1:-1]}\n" for note in notes)


if __name__ == "__main__":
    try:
        print(as_yaml(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__, end="")
    except ValueError as error:
        sys.exit(f"error: {sys.argv[1]} can't be trained here: {error}")

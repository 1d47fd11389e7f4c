"""Translate a NeMo RL configuration (GRPO, SFT or DPO): python tools/from_nemo_rl.py FILE > OURS.

Walks nemorl/runtime/config/coming_from.toml. What trains differently is a comment, or refused.
"""

import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, TemplateError, Undefined

from nemorl.checks import require
from nemorl.runtime.config.spellings import libraries, settings_in, table
from nemorl.runtime.config.tree import flat, from_dict, nested
from nemorl.runtime.config.yaml_io import dump, read
from nemorl.runtime.run.registry import ALGORITHMS

RULES = table()["importer"]
JINJA = Environment(undefined=ChainableUndefined)
REFERENCE = re.compile(r"\$\{([^${}]+)\}")
REPLACED = (
    "policy.dtensor_cfg.",
    "policy.optimizer.",
    "policy.scheduler",
)  # megatron_cfg has its own


def read_whole(path: Path) -> dict[str, Any]:
    """Return a file laid over its `defaults`."""
    tree, _ = read(path)
    parents = tree.pop("defaults", None) or []
    for parent in [parents] if isinstance(parents, str) else reversed(parents):
        tree = laid_over(read_whole(path.parent / parent), tree)
    return tree


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    if over.get("_override_"):
        return dict(over)
    both = [key for key in over if all(isinstance(each.get(key), Mapping) for each in (base, over))]
    return {**base, **over, **{key: laid_over(base[key], over[key]) for key in both}}


def resolved(value: Any, tree: Mapping[str, Any], section: str = "") -> Any:
    """Return a value without ${references}, innermost first."""
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
    """Return a.b, .sibling, oc.env:NAME, mul:x,y or div:x,y."""
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
    """Return the text of a file in the folder of the recipe, or in its `examples`."""
    here = recipe.resolve().parent
    allowed = [(here, here), *((each.parent, each) for each in here.parents)]
    for start, folder in allowed if file else ():
        found = (start / str(file)).resolve()
        near = folder == here or folder.name == "examples"
        if near and found.is_relative_to(folder) and found.is_file():
            return found.read_text(encoding="utf-8")
    require(not file, "prompt_file", "must be beside the recipe", file, "set data.prompt_template")
    return Undefined()


def translate(path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the algorithm, our settings, and notes; ValueError says why a file is refused."""
    tree = read_whole(path)
    found = [name for name in ("grpo", "sft", "dpo") if name in tree]
    require(len(found) == 1, "the file", "must hold one of grpo, sft, dpo", [*tree], "choose one")
    tree = resolved(tree, tree)
    text = functools.partial(prompt_text, recipe=path)
    names = {"algorithm": found[0], "this": tree[found[0]], "text": text, **tree}
    names |= {"search": re.search, "sub": re.sub, "datasets": RULES["datasets"]}

    def value_of(expression: str, **more: Any) -> Any:
        return JINJA.compile_expression(expression, undefined_to_none=False)(**names, **more)

    for name, expression in RULES["let"].items():
        names[name] = value_of(expression)
    ours = {key: value_of(expression) for key, expression in RULES["settings"].items()}
    theirs, meanings = flat(tree), libraries()["NeMo RL"]
    notes, refused, ignored = list[str](), list[str](), list[str]()
    for key, value in theirs.items():
        if (names["megatron"] and key.startswith(REPLACED)) or switched_off(key, theirs):
            continue
        meaning, on = meanings.get(key, ""), value not in (None, False, 0, "", [], {})
        known = bool(meaning) or not on or matches(key, RULES["read"])
        for patterns, limit in RULES["limits"].items():
            if not matches(key, patterns.split()):
                continue
            known, same = True, limit.get("same", [])
            odd = (on or True in same) and value not in same
            if odd and value_of(limit.get("when", "true"), x=value, key=key):
                reason = f"{key} {value!r}: {limit.get('refuse') or limit['note']}"
                (refused if "refuse" in limit else notes).append(reason)
        if settings_in(meaning) == [meaning] and value is not None:
            ours[meaning] = value
        elif not known and matches(key, RULES["ignored"]):
            ignored.append(key)
        elif not known:
            refused.append(f"{key} {value!r}: no such key is known: remove it")
    if refused:
        raise ValueError("; ".join(refused))
    ours = {key: value for key, value in ours.items() if not isinstance(value, Undefined)}
    from_dict(ALGORITHMS[found[0]].config, nested(ours))
    return found[0], ours, [*notes, f"without a meaning here: {', '.join(ignored)}"]


def matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def switched_off(key: str, theirs: Mapping[str, Any]) -> bool:
    parts = key.split(".")
    switches = {".".join([*parts[:depth], "enabled"]) for depth in range(1, len(parts))}
    switches -= {key, "checkpointing.enabled"}
    return any(theirs.get(each, True) in (False, None) for each in switches)


def as_yaml(path: Path) -> str:
    """Return our YAML; notes are comments."""
    try:
        algorithm, ours, notes = translate(path)
    except (ArithmeticError, LookupError, RuntimeError, TemplateError, TypeError) as error:
        raise ValueError(f"it must be as NeMo RL's own files are ({error!r})") from error
    comments = [f"nemorl {algorithm} --config THIS_FILE", *notes]
    return dump(nested(ours)) + "".join(f"# {ascii(each)[1:-1]}\n" for each in comments)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(as_yaml(Path(sys.argv[1])), end="")
    except ValueError as error:
        sys.exit(f"error: {sys.argv[1]} can't be trained here: {error}")

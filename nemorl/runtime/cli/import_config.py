"""`nemorl import-config`: a NeMo RL configuration (GRPO, SFT or DPO) in our words, with a list of
what it says that can't be honoured.

The rules are one table from NeMo RL's dotted keys to ours. A rule is our key; `Same` for a value
that needs no key because ours behaves so anyway; or a function for what takes more. Keys without a
rule are reported, never dropped in silence.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.checks import require
from nemorl.runtime.config.tree import construct, layer
from nemorl.runtime.config.yaml_io import dump, read

Settings = dict[str, Any]
"""Our dotted keys and their values."""


@dataclass(frozen=True)
class Imported:
    """What became of a file."""

    algorithm: str
    settings: dict[str, Any]
    """Ours, as nested sections: what `nemorl ALGORITHM --config` reads."""
    notes: dict[str, str]
    """Their keys that could not be honoured, or not quite, with the reason."""

    def to_yaml(self, source: str = "") -> str:
        """The settings as YAML, with the notes as comments at the end."""
        lines = [
            f"# nemorl {self.algorithm} --config THIS_FILE",
            *([f"# from {source}, a NeMo RL configuration"] if source else []),
        ]
        text = "\n".join(lines) + "\n" + dump(self.settings)
        if not self.notes:
            return text
        width = max(map(len, self.notes))
        listed = "\n".join(f"#   {key:<{width}}  {reason}" for key, reason in self.notes.items())
        return f"{text}\n# Not carried over, or not quite ({len(self.notes)} keys):\n{listed}\n"


class Note(str):
    """A reason why a key has no counterpart here."""


@dataclass(frozen=True)
class Same:
    """These values say what ours does anyway; others can't be honoured, for this reason."""

    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Unneeded:
    """Has no bearing on the numbers here; left out without a note."""


Rule = str | Same | Unneeded | Callable[[Any, Mapping[str, Any]], Settings | Note]
PARTIAL_WARM_UP = "warm-up starts at 0 instead of a share of the learning rate"


def import_config(path: str | Path) -> Imported:
    """Read a NeMo RL YAML file (with the `defaults` that it builds on, and its ${interpolations})
    and translate it.

    Raises ValueError if the file can't be read or holds none of the sections grpo, sft, dpo.
    """
    tree = _with_defaults(Path(path))
    found = [name for name in ("grpo", "sft", "dpo") if isinstance(tree.get(name), Mapping)]
    has = ", ".join(map(str, tree)) or "nothing"
    require(
        len(found) == 1,
        str(path),
        "must hold one of the sections grpo, sft, dpo",
        has,
        "only NeMo RL's configurations of these can be imported",
    )
    algorithm = found[0]
    flat = {key: _resolved(tree, key, value, path) for key, value in _flat(tree)}
    settings: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for key, value in flat.items():
        for ours, setting in _translated(algorithm, key, value, flat, notes).items():
            _put(settings, ours, setting)
    cls = _config_class(algorithm)
    complete = layer(cls, {}, settings)
    for key, needed in (
        ("model.path", "policy.model_name"),
        ("data.train", "data.train.data_path"),
    ):
        section, _, name = key.partition(".")
        if not complete[section][name]:
            notes.setdefault(needed, f"not given as a file or hub name: add --{key}")
    try:
        construct(cls, complete)
    except ValueError as error:
        notes["(the whole)"] = f"needs a change before it runs: {error}"
    return Imported(algorithm, settings, notes)


def _config_class(algorithm: str) -> type[Any]:
    from nemorl.runtime.start.registry import get_algorithm

    return get_algorithm(algorithm).config


def _translated(
    algorithm: str, key: str, value: Any, flat: Mapping[str, Any], notes: dict[str, str]
) -> Settings:
    rule = _rule(algorithm, key, flat)
    if rule is None:
        if value not in (None, {}, []):
            notes[key] = f"{value!r}: no counterpart here"
        return {}
    if isinstance(rule, str):
        return {} if value is None else {rule: value}
    if isinstance(rule, Same):
        if value not in rule.values:
            notes[key] = f"{value!r}: {rule.reason}"
        return {}
    if isinstance(rule, Unneeded):
        return {}
    result = rule(value, flat)
    if isinstance(result, Note):
        notes[key] = str(result)
        return {}
    if "(note)" in result:
        notes[key] = result.pop("(note)")
    return result


def _rule(algorithm: str, key: str, flat: Mapping[str, Any]) -> Rule | None:
    from nemorl.runtime.cli.import_rules import OPTIONAL_SECTIONS, PREFIXES, RULES

    for section, switch in OPTIONAL_SECTIONS.items():
        if key.startswith(section + ".") and key != switch and not flat.get(switch):
            return Unneeded()  # switched off
    name = key.removeprefix(f"{algorithm}.") if key.startswith(f"{algorithm}.") else key
    for spelled in (f"{algorithm}:{name}", name):
        if spelled in RULES:
            return RULES[spelled]
    return next((rule for prefix, rule in PREFIXES.items() if key.startswith(prefix)), None)


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    if section:
        place = settings.setdefault(section, {})
        place[name] = value
        if name == "name":  # which variant comes first, as people write it
            settings[section] = {"name": place.pop("name"), **place}
    else:
        settings[name] = value


# NeMo RL's YAML: `defaults` and OmegaConf's interpolation (OmegaConf itself needs another antlr4
# than math-verify).


def _with_defaults(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    require(
        path.resolve() not in seen,
        "defaults",
        "must not lead back to the file itself",
        str(path),
        "remove the circle",
    )
    tree, _ = read(path)
    for parent in reversed(
        [base] if isinstance(base := tree.pop("defaults", []), str) else list(base)
    ):
        tree = _merged(_with_defaults(path.parent / str(parent), (*seen, path.resolve())), tree)
    return tree


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


WHOLE = ("policy.tokenizer.chat_template_kwargs", "policy.generation.vllm_kwargs")
"""Mappings that are values."""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in WHOLE:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def _resolved(tree: Mapping[str, Any], key: str, value: Any, path: str | Path) -> Any:
    """The value with its ${references} replaced: ${a.b}, ${.sibling} and ${mul:x,y}, also within
    each other.
    """
    if isinstance(value, list):
        return [_resolved(tree, key, item, path) for item in value]
    if isinstance(value, Mapping):
        return {name: _resolved(tree, key, item, path) for name, item in value.items()}
    for _ in range(50):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        found = _looked_up(tree, key, match[1].strip(), path)
        value = found if match[0] == value else value.replace(match[0], str(found))
    raise ValueError(f"{path}: {key} refers to itself: {value!r}")


def _looked_up(tree: Mapping[str, Any], key: str, reference: str, path: str | Path) -> Any:
    if reference.startswith(("mul:", "div:")):
        left, right = (
            float(_resolved(tree, key, part.strip(), path)) for part in reference[4:].split(",")
        )
        result = left * right if reference.startswith("mul:") else left / right
        return int(result) if result.is_integer() else result
    target = f"{key.rpartition('.')[0]}{reference}" if reference.startswith(".") else reference
    place: Any = tree
    for part in target.lstrip(".").split("."):
        if not isinstance(place, Mapping) or part not in place:
            raise ValueError(
                f"{path}: {key} refers to {target}, which is not there: name the file with all its"
                " defaults"
            )
        place = place[part]
    return place

"""Settings from nested mappings and YAML files to frozen dataclasses, and back.

A dataclass is a section; a union of dataclasses is a section whose `name` chooses one. Pydantic
checks keys and types; the dataclasses check the rest.
"""

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nemorl.checks import closest
from nemorl.runtime.config.yaml_io import ConfigError, dump, read

Config = TypeVar("Config")

ALIASES = {
    "ratio_clip_min": "loss.clip_low",
    "ratio_clip_max": "loss.clip_high",
    "loss.ratio_clip_min": "loss.clip_low",
    "loss.ratio_clip_max": "loss.clip_high",
    "loss.ratio_clip_c": "loss.dual_clip",
    "learning_rate": "optimizer.lr",
    "optimizer.learning_rate": "optimizer.lr",
    "reference_policy_kl_penalty": "kl.coef",
    "use_dynamic_sampling": "dynamic_sampling",
    "max_num_epochs": "num_epochs",
    "train_micro_batch_size": "trainer.train_micro_batch_size",
    "max_total_sequence_length": "data.max_total_sequence_length",
    "max_new_tokens": "generation.max_new_tokens",
    "max_grad_norm": "optimizer.max_grad_norm",
    "val_period": "run.val_period",
    "val_at_start": "run.val_at_start",
    "max_val_samples": "run.max_val_samples",
    "save_period": "run.save_period",
    "seed": "run.seed",
    "output_dir": "run.dir",
    "dir": "run.dir",
    "precision": "parallel.param_dtype",
}
"""Other libraries' spellings in YAML files and `nemorl.train`."""


def from_dict(cls: type[Config], mapping: Mapping[str, Any]) -> Config:
    """Return the config that nested sections describe.

    >>> from nemorl.runtime.config.grpo import GRPOConfig
    >>> from_dict(GRPOConfig, {"kl": {"coeff": 0.1}})
    Traceback (most recent call last):
    ConfigError: unknown key kl.coeff; did you mean kl.coef? ...
    """
    return construct(cls, layer(cls, {}, mapping))


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested plain values, ready for YAML or JSON."""
    return dataclasses.asdict(config)


def load_config(cls: type[Config], path: str | Path) -> Config:
    """Return the config that a YAML file describes; errors name the file and line."""
    return construct(cls, yaml_layer(cls, {}, path))


def dump_yaml(config: Any) -> str:
    """Return a config as YAML that `load_config` reads back as an equal one."""
    return dump(to_dict(config))


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


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override` laid over `base`. A section whose `name` changes starts afresh.

    >>> merge({"lr": 1, "loss": {"name": "clipped", "clip_low": 0.1}}, {"loss": "reinforce"})
    {'lr': 1, 'loss': {'name': 'reinforce'}}
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping):
            if value is None:
                continue  # a section with nothing but comments in it
            if isinstance(value, str) and "name" in old:
                value = {"name": value}
            if isinstance(value, Mapping) and value.get("name", name := old.get("name")) == name:
                value = merge(old, value)
        merged[key] = value
    return merged


def layer(cls: type, tree: Mapping[str, Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mapping` laid over `tree` (over the defaults if that is empty).

    Only keys and types are checked: a later layer may change the rest.
    """
    merged = merge(tree or defaults(cls), _without_aliases(cls, mapping))
    if mapping:
        _validated(cls, merged, ignored=("value_error", "missing"))
    return merged


def yaml_layer(cls: type, tree: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return `layer` of a YAML file; errors name the file and line."""
    mapping, lines = read(path)
    mapping.pop("environment", None)
    try:
        return layer(cls, tree, mapping)
    except ConfigError as error:
        spelled = [alias for alias in lines if ALIASES.get(alias) == error.key]
        line = "".join(f", line {lines[key]}" for key in [error.key, *spelled] if key in lines)
        raise ConfigError(f"{path}{line}: {error}", error.key) from None


def construct(cls: type[Config], tree: Mapping[str, Any]) -> Config:
    """Return the config of a tree, checked in every way."""
    return typing.cast(Config, _validated(cls, tree))


def fields_of(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return every field of a config dataclass with its resolved type."""
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def variants(hint: Any) -> tuple[type, ...]:
    """Return the dataclasses that a field may hold: several for a union, none for a value."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    return members if all(map(dataclasses.is_dataclass, members)) else ()


def by_name(section: tuple[type, ...]) -> dict[str, type]:
    """Return the variants of a union by their `name`."""
    return {defaults(cls)["name"]: cls for cls in section}


def unions(cls: type) -> dict[str, dict[str, type]]:
    """Return the sections that have several variants, with these by name."""
    found = {field.name: variants(hint) for field, hint in fields_of(cls)}
    return {name: by_name(members) for name, members in found.items() if len(members) > 1}


def dotted_keys(cls: type) -> dict[str, bool]:
    """Return every key of a config and the aliases: True for our own spelling.

    >>> from nemorl.runtime.config.sft import SFTConfig
    >>> dotted_keys(SFTConfig)["optimizer.lr"], dotted_keys(SFTConfig)["learning_rate"]
    (True, False)
    """
    own = dict.fromkeys(_keys(cls), True)
    return {alias: False for alias, target in ALIASES.items() if target in own} | own


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    for field, hint in fields_of(cls):
        if not variants(hint):
            yield prefix + field.name
        for variant in variants(hint):
            yield from _keys(variant, f"{prefix}{field.name}.")


def defaults(cls: type) -> dict[str, Any]:
    """Return the settings that have a default, as nested plain values."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            found[field.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return found


def _without_aliases(cls: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mapping` in our own spelling."""
    result = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()
    }
    known = dotted_keys(cls)
    for alias, target in ALIASES.items():
        place, _, name = alias.rpartition(".")
        source = result.get(place) if place else result
        if known.get(alias, True) or not isinstance(source, dict) or name not in source:
            continue
        section, _, ours = target.rpartition(".")
        target_section = result
        if section:
            given = result.get(section) or {}
            target_section = given if isinstance(given, dict) else {"name": given}
            result[section] = target_section
        if ours in target_section:
            raise ConfigError(f"{alias} and {target} are the same setting: keep one", alias)
        target_section[ours] = source.pop(name)
    return result


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # not needed for --help

    # The union is there because pydantic takes no config for a dataclass by itself.
    return TypeAdapter(typing.cast(Any, cls | None), config=ConfigDict(extra="forbid", strict=True))


def _validated(cls: type, tree: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> Any:
    from pydantic import ValidationError

    try:  # as JSON, in which lists are tuples and mappings are dataclasses even if strict
        return _adapter(cls).validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] not in ignored:
                raise _explained(cls, problem) from None


def _explained(cls: type, problem: Mapping[str, Any]) -> ValueError:
    """Return our words for a problem that pydantic found."""
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
            owner, hint = section[0], typing.get_type_hints(section[0]).get(step)
    key = ".".join(keys)
    if kind == "unexpected_keyword_argument":
        return _unknown_key(cls, owner, key)
    if kind == "union_tag_invalid":
        key, value = f"{key}.name", context["tag"]
    if kind == "missing":
        message = "must be given: it has no default"
    elif "expected" in context or "expected_tags" in context:
        names = (context.get("expected") or context["expected_tags"]).replace(" or ", ", ")
        names = names.replace("'", "").split(", ")
        message = f"must be one of {', '.join(names)}, but it is {value!r}"
        message += closest(str(value), names)
    elif variants(hint):
        message = f"must be a section, but it is {value!r}: write its keys below it, indented"
    else:
        words = {"bool_type": "true or false", "tuple_type": "a list", "dict_type": "a mapping"}
        what = words.get(kind) or problem["msg"].partition("should be ")[2]
        message = f"must be {what}, but it is {value!r}{_remedy(kind, value)}"
    return ConfigError(f"{key} {message}", key)


def _remedy(kind: str, value: Any) -> str:
    if kind == "string_type":
        return f': write "{value}", with quotes' if isinstance(value, int | float) else ""
    if value in ("None", "none"):
        return ": write null"
    if isinstance(value, str) and re.fullmatch(r"[-+.\deE]+|true|false", value):
        return ": give it without quotes"
    return f": write [{value}]" if kind == "tuple_type" else ""


def _unknown_key(cls: type, owner: type, key: str) -> ConfigError:
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    names = [field.name for field in dataclasses.fields(owner)]
    elsewhere = dict.fromkeys(each for each in _keys(cls) if each.rpartition(".")[2] == name)
    elsewhere.pop(key, None)
    hint = closest(key, [prefix + each for each in names]) or ";"
    if elsewhere:
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    of = " ".join(filter(None, [section, defaults(owner).get("name")]))
    listed = f"keys{f' of {of}' if of else ''}: {', '.join(names)}"
    return ConfigError(f"unknown key {key}{hint} {listed}", key)

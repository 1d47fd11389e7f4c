"""Configs from plain mappings and YAML files, and back: every key known, every value of its type,
every error with the key's full name and line.

Works for any tree of frozen dataclasses: a field that is a dataclass is a section, a union of
dataclasses is a section whose `name` says which.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

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
"""Spellings of NeMo RL and other libraries that are accepted in YAML, where they mean the same as
ours.
"""


def from_dict(
    cls: type[Config], mapping: Mapping[str, Any], *, base: Config | None = None
) -> Config:
    """The config that `mapping` (nested sections) describes; what it leaves out is taken from
    `base`, or is the default.

    Raises ValueError for unknown keys, wrong types and whatever the dataclasses refuse.

    >>> from nemorl.runtime.config.base import GRPOConfig
    >>> from_dict(GRPOConfig, {"loss": {"name": "gspo"}, "optimizer": {"lr": 1e-6}}).loss
    GSPOLoss(name='gspo', clip_low=0.0003, clip_high=0.0004, token_gradient=False)
    >>> from_dict(GRPOConfig, {"kl": {"coeff": 0.1}})
    Traceback (most recent call last):
    nemorl.runtime.config.yaml_io.ConfigError: unknown key kl.coeff; did you mean kl.coef? keys of kl: coef, estimator, gradient
    """
    return construct(cls, layer(cls, to_dict(base) if base is not None else {}, mapping))


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested plain values, ready for YAML or JSON:

    `from_dict(type(config), to_dict(config)) == config`.
    """
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def load_config(cls: type[Config], path: str | Path, *, base: Config | None = None) -> Config:
    """The config that a YAML file describes; errors name the file and line."""
    return construct(cls, yaml_layer(cls, to_dict(base) if base is not None else {}, path))


def dump_yaml(config: Any) -> str:
    """The config as YAML that `load_config` reads back as an equal one."""
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
    """`override` over `base`, section by section. A section whose `name` changes starts afresh:
    another variant has other keys.

    >>> merge({"lr": 1, "loss": {"name": "clipped", "clip_low": 0.1}}, {"loss": {"name": "reinforce"}})
    {'lr': 1, 'loss': {'name': 'reinforce'}}
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and value is None:
            continue  # a section with nothing but comments in it
        if isinstance(old, Mapping) and isinstance(value, str) and "name" in old:
            value = {"name": value}
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            value = merge(old, value)
        merged[key] = value
    return merged


# The steps from layers to a config: complete trees of plain values, so that checks across fields
# see only the final one.


def layer(
    cls: type,
    tree: Mapping[str, Any],
    mapping: Mapping[str, Any],
    *,
    lines: Mapping[str, int] | None = None,
    path: str | Path = "",
) -> dict[str, Any]:
    """The complete tree of `cls` with `mapping` laid over `tree`: keys known and types right, but
    not yet checked across fields.
    """
    spelled: dict[str, str] = {}
    try:
        return _complete(cls, merge(_complete(cls, tree), _without_aliases(cls, mapping, spelled)))
    except ConfigError as error:
        written = spelled.get(error.key, error.key)
        line = (lines or {}).get(written)
        where = f"{path}, line {line}: " if line else f"{path}: " if path else ""
        alias = f" ({error.key} is written as {written})" if written != error.key else ""
        raise ConfigError(f"{where}{error}{alias}", error.key) from None


def yaml_layer(cls: type, tree: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """`layer` of a YAML file."""
    mapping, lines = read(path)
    mapping.pop("environment", None)
    return layer(cls, tree, mapping, lines=lines, path=path)


def construct(cls: type[Config], tree: Mapping[str, Any]) -> Config:
    """The dataclasses of a complete tree; their own checks run here."""
    values = {}
    for field, hint in fields_of(cls):
        if field.name not in tree:
            raise ConfigError(f"{field.name} must be given: it has no default", field.name)
        value = tree[field.name]
        section = variants(hint)
        if section:
            value = construct(
                section[0] if len(section) == 1 else by_name(section)[value["name"]], value
            )
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def fields_of(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Every field of a config dataclass with its resolved type."""
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def variants(hint: Any) -> tuple[type, ...]:
    """The dataclasses that a field may hold: one of a plain section, several of a union, none of a
    value.
    """
    members = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    return members if all(dataclasses.is_dataclass(member) for member in members) else ()


def by_name(section: tuple[type, ...]) -> dict[str, type]:
    """The variants of a union by their `name`."""
    return {
        next(str(field.default) for field in dataclasses.fields(cls) if field.name == "name"): cls
        for cls in section
    }


def closest(word: str, words: Iterable[str]) -> str:
    """A did-you-mean for error messages, or nothing.

    >>> closest("dtenosr", ["dtensor", "megatron"])
    '; did you mean dtensor?'
    """
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)
    return f"; did you mean {matches[0]}?" if matches else ""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def _complete(cls: type, mapping: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{key} must be a section with keys of its own, but it is {mapping!r}: write them below"
            " it, indented",
            key,
        )
    prefix = f"{key}." if key else ""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in mapping:
        if name not in names:
            raise _unknown_key(cls, names, str(name), key)
    tree = {}
    for field, hint in fields_of(cls):
        default = _default(field)
        section = variants(hint)
        if section:
            value = merge({"section": default or {}}, {"section": mapping.get(field.name)})[
                "section"
            ]
            chosen = (
                section[0] if len(section) == 1 else _variant(section, value, prefix + field.name)
            )
            tree[field.name] = _complete(chosen, value, prefix + field.name)
        elif field.name in mapping:
            tree[field.name] = _leaf(hint, mapping[field.name], prefix + field.name)
        elif default is not dataclasses.MISSING:
            tree[field.name] = default
    return tree


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return _plain(field.default_factory())
    return _plain(field.default)


def _variant(section: tuple[type, ...], value: Any, key: str) -> type:
    if not isinstance(value, Mapping):
        return section[0]  # refused by _complete, with its own message
    known = by_name(section)
    name = value.get("name")
    if name not in known:
        raise ConfigError(
            f"{key}.name must be one of {', '.join(known)}, but it is"
            f" {name!r}{closest(str(name), known)}",
            f"{key}.name",
        )
    return known[name]


def _unknown_key(cls: type, names: list[str], name: str, section: str) -> ConfigError:
    full = f"{section}.{name}" if section else name
    elsewhere = [key for key in _keys(cls) if key.rsplit(".", 1)[-1] == name]
    hint = (
        f"; did you mean {' or '.join(elsewhere)}?"
        if elsewhere
        else closest(full, [f"{section}.{known}" if section else known for known in names])
    )
    variant = next(
        (field.default for field in dataclasses.fields(cls) if field.name == "name"), None
    )
    of = f"{section} {variant}" if variant else section
    return ConfigError(
        f"unknown key {full}{hint or ';'} keys{f' of {of}' if of else ''}: {', '.join(names)}", full
    )


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config, of all variants."""
    for field, hint in fields_of(cls):
        section = variants(hint)
        yield from dict.fromkeys(
            key for variant in section for key in _keys(variant, f"{prefix}{field.name}.")
        )
        if not section:
            yield prefix + field.name


def dotted_keys(cls: type) -> dict[str, bool]:
    """Every key of a config by its full name, and the other spellings of `ALIASES`; True where it
    is our own spelling.

    >>> from nemorl.runtime.config.base import SFTConfig
    >>> dotted_keys(SFTConfig)["optimizer.lr"], dotted_keys(SFTConfig)["learning_rate"]
    (True, False)
    """
    own = dict.fromkeys(_keys(cls), True)
    return own | {
        alias: False for alias, target in ALIASES.items() if target in own and alias not in own
    }


def _leaf(hint: Any, value: Any, key: str) -> Any:
    """The value if it is of its type.

    Nothing is coerced but an int to a float, and a tuple to a list (which a tree holds in its
    place).
    """
    if not _fits(hint, value):
        raise ConfigError(
            f"{key} must be {_describe(hint)}, but it is {value!r}{_remedy(hint, value)}", key
        )
    if type(value) is int and float in (hint, *typing.get_args(hint)):
        return float(value)
    return _plain(value)


def _fits(hint: Any, value: Any) -> bool:
    from pydantic import TypeAdapter, ValidationError  # not needed where nothing is given

    try:
        TypeAdapter(hint).validate_python(
            tuple(value) if isinstance(value, list) else value, strict=True
        )
    except ValidationError:
        return False
    return True


def _describe(hint: Any) -> str:
    words = {
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        type(None): "null",
    }
    if hint in words:
        return words[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if typing.get_origin(hint) is tuple:
        return f"a list, of which each is {_describe(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "a mapping from names to values"
    return " or ".join(map(_describe, arguments))


def _remedy(hint: Any, value: Any) -> str:
    if value in ("None", "none") and type(None) in typing.get_args(hint):
        return ": write null"
    if typing.get_origin(hint) is Literal:
        return closest(str(value), map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple and isinstance(value, str | int):
        return f": write [{value}]"
    if isinstance(value, str) and hint is not str:
        return ": give it without quotes" if re.fullmatch(r"[-+.\deE]+|true|false", value) else ""
    return (
        f': write "{value}", with quotes'
        if isinstance(value, int | float) and str in (hint, *typing.get_args(hint))
        else ""
    )


def _without_aliases(
    cls: type, mapping: Mapping[str, Any], spelled: dict[str, str]
) -> dict[str, Any]:
    """`mapping` in our own spelling; `spelled` is told which of our keys was written how."""
    result = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()
    }
    known = set(_keys(cls))
    for alias, target in ALIASES.items():
        section, _, name = alias.rpartition(".")
        source = result.get(section) if section else result
        if (
            not isinstance(source, dict)
            or name not in source
            or alias in known
            or target not in known
        ):
            continue
        section, _, ours = target.rpartition(".")
        if isinstance(result.get(section), str):
            result[section] = {"name": result[section]}  # the short form of a union
        place = result if not section else result.setdefault(section, {})
        if not isinstance(place, dict):
            place = result[section] = {}
        if ours in place:
            raise ConfigError(
                f"{alias} and {target} are the same setting: keep one of the two", alias
            )
        place[ours] = source.pop(name)
        spelled[target] = alias
    return result

"""YAML as people write it: 1e-5 is a number and 10:12 is none, a key given twice is an error, and
every key knows its line.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A key or value that a config can't take; `key` is its full dotted name."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
_COLONS = re.compile(r"[-+]?[\d_]+(?::\d+)+(?:\.\d*)?$")
for _first in "-+0123456789":  # 10:12 is no number to base 60
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _COLONS))


def dump(mapping: Mapping[str, Any]) -> str:
    """Nested plain values as YAML that `read` reads back as they are."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML file and the line of every dotted key; a `ConfigError` names file and
    line of what can't be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can't read the config file {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = dict(_lines(node, path)) if node is not None else {}
        mapping = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{path}{f', line {error.problem_mark.line + 1}' if error.problem_mark else ''}: not"
            f" valid YAML: {error.problem}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{path} must hold keys and sections (`key: value`), but it holds {mapping!r:.40}"
        )
    return mapping, lines


def _lines(node: yaml.Node, path: str | Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:merge":
            key.tag = "tag:yaml.org,2002:str"  # `3:` and `off:` are names, too
        if name in seen and name != "<<":
            raise ConfigError(
                f"{path}, line {line}: {prefix}{name} is given twice, first in line {seen[name]}:"
                " keep one of the two",
                prefix + name,
            )
        seen[name] = line
        yield prefix + name, line
        yield from _lines(value, path, f"{prefix}{name}.")

"""YAML 1.2: 1e-5 is a number, 10:12 and off are strings, a key given twice is an error."""

import json
import math
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode

MAX_VALUES, MAX_DEPTH, MAX_DIGITS = 100_000, 100, 400
"""Of a file, with each alias written out; of brackets within brackets; of a number."""
MAX_TEXT = 10_000_000
_DEEP = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH}}}")  # ruamel.yaml takes minutes for them


class ConfigError(ValueError):
    """A key or value that a config can't have; `key` is its dotted name."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


def dump(
    mapping: Mapping[str, Any], comments: Mapping[str, str] | None = None, prefix: str = ""
) -> str:
    """Return nested plain values as YAML that parsers of versions 1.1 and 1.2 read alike, with
    comments above their dotted keys.
    """
    text, indent = "", "  " * prefix.count(".")
    for key, value in mapping.items():
        nested = isinstance(value, Mapping) and value
        if comment := (comments or {}).get(f"{prefix}{key}"):
            above = "\n" if nested and text else ""
            text += above + fill(
                comment,
                100,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            text += "\n"
        text += f"{indent}{key}:" + ("\n" if nested else f" {_inline(value)}\n")
        text += dump(value, comments, f"{prefix}{key}.") if nested else ""
    return text


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file, and the line of every dotted key.

    Raises: ConfigError for a file that can't be read, or that would expand without end.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        with Path(path).open(encoding="utf-8") as file:  # which may be a pipe, or /dev/zero
            text = file.read(MAX_TEXT + 1)
        if len(text) > MAX_TEXT:
            raise YAMLError(f"it has more than {MAX_TEXT} characters")
        if _DEEP.search(text):
            raise YAMLError(f"brackets are nested more than {MAX_DEPTH} deep")
        node = yaml.compose(text)
        _count(node, {})  # before aliases are written out
        tree = yaml.load(text)
        plain = json.loads(json.dumps({} if tree is None else tree, default=str))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't read the config file {path}: {why}") from None
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        where = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or error
        remedy = ": keep one" if isinstance(error, DuplicateKeyError) else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {why}{remedy}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # of a value, or a key
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must hold keys and sections (`key: value`), not {plain!r:.40}")
    return plain, _lines(node)


def _count(node: Any, counts: dict[int, float]) -> float:
    """Return how many values a node has, those of each alias counted as if they were written out.

    Raises: MarkedYAMLError for too many, a value that contains itself, or too long a number.
    """
    if id(node) in counts:
        return counts[id(node)]
    children: list[Any] = []
    counts[id(node)], problem = math.inf, ""
    if isinstance(node, ScalarNode):
        if str(node.tag).endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            problem = f"a number must have at most {MAX_DIGITS} digits, not {len(node.value)}"
    elif node is not None:
        mapping = isinstance(node, MappingNode)
        children = list(chain.from_iterable(node.value)) if mapping else node.value
    counts[id(node)] = count = sum((_count(child, counts) for child in children), 1.0)
    if count > MAX_VALUES:
        problem = (
            f"with its aliases (*name) written out it must have at most {MAX_VALUES} values, and"
            " none may contain itself: remove aliases"
        )
    if problem:
        raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return count


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, MappingNode) else ():
        name = f"{prefix}{key.value}"
        lines |= {name: key.start_mark.line + 1} | _lines(value, f"{name}.")
    return lines


_PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null|none)$)[a-z_/][\w/.-]*", re.I)
"""Strings that need no quotes in any version of YAML."""


def _inline(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = text.replace("Infinity", ".inf").replace("NaN", ".nan")
        return text if "." in text else text.replace("e", ".0e")
    return text

"""YAML 1.2: 1e-5 is a number, 10:12 and off are strings, a key given twice is an error; and which
settings of a file name code.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, ScalarNode

MAX_TEXT, MAX_VALUES = 10_000_000, 1_000_000
"""Characters of a file, and values with each alias written out."""


class ConfigError(ValueError):
    """A key or value that a config can't have; `key` is its dotted name."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


def dump(mapping: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return nested plain values as YAML that versions 1.1 and 1.2 read alike.

    comments: lines above dotted keys. Raises: ConfigError for other values and keys.
    """
    return _section(mapping, comments or {}, "", "")


def _section(
    mapping: Mapping[Any, Any], comments: Mapping[str, str], prefix: str, indent: str
) -> str:
    text = ""
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and value
        if comment := comments.get(name):
            text += "\n" if nested and text else ""
            lines = wrap(comment, 98 - len(indent), break_long_words=False, break_on_hyphens=False)
            text += "".join(f"{indent}# {line}\n" for line in lines)
        text += indent + _key(key, name)
        text += ":\n" if nested else f": {_inline(value, name)}\n"
        text += _section(value, comments, f"{name}.", f"{indent}  ") if nested else ""
    return text


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file, and the line of every dotted key.

    Raises: ConfigError for a file that can't be read, or that would expand without end.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:  # which may be a pipe, or /dev/zero
            text = file.read(MAX_TEXT + 1)
        if len(text) > MAX_TEXT:
            raise yaml.YAMLError(f"it has more than {MAX_TEXT} characters")
        if found := re.search("[\x85\u2028\u2029]", text):
            line, code = text.count("\n", 0, found.start()) + 1, f"U+{ord(found[0]):04X}"
            raise yaml.YAMLError(f"line {line} has {code}, a line break in YAML 1.1: escape it")
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = _lines(node)
        tree = {} if node is None else loader.construct_document(node)
        parts = [*islice(json.JSONEncoder(default=str).iterencode(tree), MAX_VALUES + 1)]
        if len(parts) > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES} values: remove aliases (*name)")
        plain = json.loads("".join(parts))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't read the config file {path}: {why}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        last = text.rstrip("\n").count("\n")  # libyaml counts one more at the end
        where = f", line {min(mark.line, last) + 1}" if mark else ""
        why = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{path}{where}: not valid YAML: {why}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or sections must not be nested so deep") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must hold keys and sections (`key: value`), not {plain!r:.40}")
    return plain, lines


_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, or a slow one


class _Loader(_Parser):
    """Reads PyYAML's syntax with YAML 1.2's types. Keys are texts, as they are written."""

    yaml_implicit_resolvers: Mapping[str, Any] = {}

    def __init__(self, text: str):
        _Parser.__init__(self, text)
        Composer.__init__(self)

    # libyaml's own composer knows no limit of depth: it crashes the process.
    get_single_node = Composer.get_single_node
    compose_document = Composer.compose_document
    compose_scalar_node = Composer.compose_scalar_node
    compose_sequence_node = Composer.compose_sequence_node
    compose_mapping_node = Composer.compose_mapping_node
    compose_node = Composer.compose_node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        if not isinstance(node, MappingNode):
            raise _error("a mapping is needed here", node.start_mark)
        own = set[str]()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise _error("keys must be strings, not lists or mappings", key.start_mark)
            if key.value in own:
                raise _error(f"duplicate key {key.value!r:.80}: keep one", key.start_mark)
            own.add(key.value)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node).replace("_", "").lower()
        return int(text, {"0b": 2, "0o": 8, "0x": 16}.get(text.lstrip("+-")[:2], 10))

    def construct_yaml_float(self, node: Any) -> float:
        text = self.construct_scalar(node).replace("_", "").lower()
        return float(re.sub(r"\.(?=inf|nan)", "", text))


for _type, _first, _pattern in (
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("null", ("~", "n", "N", ""), r"~|null|Null|NULL|"),
    ("int", "-+0123456789", r"[-+]?(0b[01_]+|0o[0-7_]+|0x[\da-fA-F_]+|\d[\d_]*)"),
    ("float", "-+.0123456789", r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?"),
    ("float", "-+.", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ("timestamp", "0123456789", r"\d{4}-\d\d?-\d\d?([Tt \t]+\d\d?:\d\d:\d\d.*)?"),
    ("merge", "<", "<<"),
):
    _tag = f"tag:yaml.org,2002:{_type}"
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z", re.ASCII), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _error(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, MappingNode) else ():
        name = f"{prefix}{key.value}"
        lines |= {name: key.start_mark.line + 1} | _lines(value, f"{name}.")
    return lines


_PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null|none)$)[a-z_/][\w/.-]*", re.I)
"""Strings that need no quotes in any version of YAML."""
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""What json leaves and a reader may refuse or take for a line break."""


def _inline(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_inline(each, name) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key, name)}: {_inline(each, name)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()  # not a part of a character
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must hold text, numbers, true, false, null, lists and mappings, but it holds"
            f" {value!r:.80} ({error})",
            name,
        ) from None
    if isinstance(value, float):
        text = text.replace("Infinity", ".inf").replace("NaN", ".nan")
        return text if "." in text else text.replace("e", ".0e")
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"keys of {name} must be text, but one is {key!r}: make it a text", name)
    return _inline(key, name)


IMPORTED = ("loss", "advantage")
BY_ROW = ("reward", "rollout.environment")
"""Names of code, or mappings to them."""
CODE = (
    *(*BY_ROW, *IMPORTED, "rollout.agent", "rollout.worker", "generation.python"),
    *("generation.engine", "model.trust_remote_code", "trust_remote_code"),
)
WHOLE = "rollout.agent", "generation.python"
"""Settings that are programs."""
WORDS = ("dtype", "kv_cache_dtype", "quantization")
"""Arguments of vLLM that are words of its own."""
SECRET = "<secret, not kept>"
"""Stands for a secret in all that is written or printed."""
_SECRET = re.compile("(key|token|secret|password)$", re.IGNORECASE)
_HARMLESS = re.compile("(bos|cls|eos|mask|pad|sep|stop|unk)_token|(answer|prompt|response)_key")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return settings with SECRET for each text in `env_vars`, or below a key that ends in key,
    token, secret or password, but for special tokens (pad_token) and columns (prompt_key).

    >>> without_secrets({"api_key": "sk-1", "pad_token": "<pad>", "max_tokens": 5})
    {'api_key': '<secret, not kept>', 'pad_token': '<pad>', 'max_tokens': 5}
    """
    hides = key == "env_vars" or (_SECRET.search(key) and not _HARMLESS.fullmatch(key))
    if isinstance(value, Mapping):
        return {name: without_secrets(each, key if hides else name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(each, key) for each in value)
    number = isinstance(value, int | float) and not key.lower().endswith(("secret", "password"))
    return value if not hides or value is None or number else SECRET


def code_of(tree: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Return the code that settings run, and its flag, by the setting."""
    found = {}
    for setting in CODE:
        value: Any = tree
        for part in setting.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if setting in IMPORTED and isinstance(value, Mapping):
            value = value.get("name")
        words = [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
        named = [text for text in texts_in(value) if ":" in text or setting in WHOLE]
        if setting.endswith("trust_remote_code"):
            named, words = ["the code that comes with the model"], []
        elif isinstance(value, Mapping):
            if setting not in BY_ROW:
                named = [
                    key for key, each in value.items() if key not in WORDS and any(texts_in(each))
                ]
            words = [json.dumps(without_secrets(value), default=str)]
        if value and named:
            found[setting] = (", ".join(named), [f"--{setting}".replace("_", "-"), *words])
    return found


def texts_in(value: Any) -> list[str]:
    """Return a text, or those in a list or mapping."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return [text for part in parts for text in texts_in(part)]
    return [value] if isinstance(value, str) else []


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What may run of it."""

    given: Mapping[str, str] = field(default_factory=dict)
    runs: Literal["given", "all", "none"] = "given"
    """none: settings are only printed, for which a loss or advantage alone is imported."""
    typed: tuple[str, ...] = ()
    """The command line; none in Python."""

    def require(self, used: Mapping[str, Any]) -> None:
        """Raise ConfigError for code in the settings `used` of a file that may not run."""
        runs = {"given": CODE, "all": (), "none": IMPORTED}[self.runs]
        code = code_of(used).items()
        found = {key: each for key, each in code if key in runs and key not in self.given}
        if not found:
            return
        names = ", ".join(found)
        command = shlex.join([*self.typed, *(word for _, flag in found.values() for word in flag)])
        remedy = f"type\n  {command}\nor add --trust-code for all that the file names"
        if not self.typed:
            remedy = f"pass trust_code=True, or set {names} in Python"
        raise ConfigError(
            f"{names} would run {', '.join(what for what, _ in found.values())}, which a file alone"
            f" may not decide: if you trust it, {remedy}",
            next(iter(found)),
        )

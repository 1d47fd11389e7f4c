"""What a file of settings may not do: name code alone, which runs if the command line names it,
too, or says --trust-code; and keep secrets.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemorl.runtime.config.yaml_io import ConfigError

FUNCTIONS = ("reward", "loss", "advantage")
CODE = (
    *(*FUNCTIONS, "rollout.environment", "rollout.worker", "generation.python"),
    *("generation.engine", "model.trust_remote_code", "trust_remote_code"),
)
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
        if setting in FUNCTIONS and isinstance(value, Mapping):
            value = value.get("name")
        words = [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
        named = [word for word in words if ":" in word or setting == "generation.python"]
        if setting.endswith("trust_remote_code"):
            named, words = ["the code that comes with the model"], []
        elif isinstance(value, Mapping):
            named = [key for key, each in value.items() if key not in WORDS and _may_name(each)]
            words = [json.dumps(without_secrets(value), default=str)]
        if value and named:
            found[setting] = (", ".join(named), [f"--{setting}".replace("_", "-"), *words])
    return found


def _may_name(value: Any) -> bool:  # vLLM and Ray import several texts
    if isinstance(value, Mapping | list | tuple):
        return any(map(_may_name, value.values() if isinstance(value, Mapping) else value))
    return bool(value) and not isinstance(value, int | float)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What may run of it."""

    given: Mapping[str, str] = field(default_factory=dict)
    runs: Literal["given", "all", "none"] = "given"
    """none: settings are only printed or compared."""
    typed: tuple[str, ...] = ()
    """The command line; none in Python."""

    def require(self, used: Mapping[str, Any]) -> None:
        """Raise ConfigError for code in the settings `used` of a file that may not run."""
        found = {key: each for key, each in code_of(used).items() if key not in self.given}
        if self.runs != "given" or not found:
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

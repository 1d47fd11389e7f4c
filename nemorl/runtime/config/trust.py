"""Whether the code that a file of settings names may run.

It runs if the command line names it, too, or says --trust-code, or if the file has a seal: the
HMAC-SHA256 of its code by a random key of the user's, which nobody else can read. A run's
config.yaml gets one when the run is made, so its user resumes it on that machine without a word.
"""

import hashlib
import hmac
import json
import os
import secrets
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from nemorl.runtime.config.yaml_io import ConfigError
from nemorl.user_code import place_of
from nemorl.warn import warn

FUNCTIONS = ("reward", "loss", "advantage")
"""Settings that may name functions of the user's, as module:function."""
CODE = (
    *FUNCTIONS,
    *("model.trust_remote_code", "trust_remote_code", "generation.python", "generation.engine"),
    "rollout.environment",
)
"""All settings that may name code."""
WORDS = ("dtype", "kv_cache_dtype", "quantization")
"""Arguments of vLLM's whose values are words of its own, so they name no code."""
KEY_BYTES = 32


@dataclass(frozen=True)
class Code:
    """Code that a setting runs: what it is, the flag for it, and what the seal covers."""

    what: str
    flag: str
    places: Sequence[str]


def code_of(tree: Mapping[str, Any]) -> dict[str, Code]:
    """Return the code that settings run, by the setting. Nothing is imported.

    >>> code_of({"reward": ["math", "./f.py:fn"], "loss": {"name": "gspo"}})["reward"].flag
    '--reward math ./f.py:fn'
    """
    return {setting: code for setting, code in _code_of(tree) if code.what}


def _code_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, Code]]:
    for setting in FUNCTIONS:
        value = tree.get(setting)
        value = value.get("name") if isinstance(value, Mapping) else value
        names = [*map(str, value)] if isinstance(value, list | tuple) else [str(value or "")]
        own = [name for name in names if ":" in name]
        places = [f"{name} {place_of(name)}" for name in own]
        yield setting, Code(", ".join(own), f"--{setting} {shlex.join(names)}", places)
    name = str(_section(tree, "rollout").get("environment") or "")
    what = name if ":" in name else ""
    flag = f"--rollout.environment {shlex.quote(name)}"
    yield "rollout.environment", Code(what, flag, [f"{name} {place_of(name)}"])
    for section in ("model", ""):
        values = _section(tree, section) if section else tree
        setting = ".".join(filter(None, (section, "trust_remote_code")))
        what = "the code that comes with the model" if values.get("trust_remote_code") else ""
        models = [_placed(values.get(key)) for key in ("path", "tokenizer", "base_model")]
        yield setting, Code(what, f"--{setting}".replace("_", "-"), models)
    generation = _section(tree, "generation")
    python, engine = str(generation.get("python") or ""), _section(generation, "engine")
    yield "generation.python", Code(python, f"--generation.python {python}", [_placed(python)])
    text = json.dumps(engine, sort_keys=True, default=str)
    named = " and ".join(k for k, value in engine.items() if k not in WORDS and _may_name(value))
    what = f"the modules that {named} may name" if named else ""
    yield "generation.engine", Code(what, f"--generation.engine {shlex.quote(text)}", [text])


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _placed(name: Any) -> str:
    """Return the path of a file or folder; a name on the hub as it is."""
    path = Path(str(name or "")).expanduser()
    return str(path.resolve()) if name and path.exists() else str(name or "")


def _may_name(value: Any) -> bool:
    """Return whether a value holds text: vLLM imports several of its arguments."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_may_name, value.values() if isinstance(value, Mapping) else value))
    return bool(value) and not isinstance(value, int | float)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What may run of the code that files name."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Settings given as flags, and the flag's value."""
    everything: bool = False
    """--trust-code, or trust_code=True."""
    runs: bool = True
    """False where settings are only printed or compared: no code of a file is imported."""
    in_python: bool = False

    def require(self, used: Mapping[str, Any], file: Mapping[str, Any]) -> None:
        """Raise ConfigError for code in the settings `used` of a file that may not run."""
        if self.everything or not self.runs:
            return
        found = {key: each for key, each in code_of(used).items() if key not in self.given}
        if not found or (why := distrusted(file)) is None:
            return
        for setting, code in found.items():
            remedy = f"add {code.flag} if you trust it, or --trust-code for all that the file names"
            if self.in_python:
                remedy = f"pass trust_code=True if you trust it, or set {setting} in Python"
            raise ConfigError(
                f"{setting} would run {code.what}, which a file alone may not decide{why}:"
                f" {remedy}",
                f"{setting}.name" if isinstance(used.get(setting), Mapping) else setting,
            )


def seal_of(tree: Mapping[str, Any]) -> str | None:
    """Return the seal of the code that settings name; None without code, or where there can be no
    key, which is a warning.
    """
    if not code_of(tree):
        return None
    try:
        return _hmac(tree, _make_key())
    except (OSError, RuntimeError) as error:
        warn(
            "the code that this run names can't be sealed, so a resume has to name it, or needs"
            f" --trust-code: {error}; set XDG_STATE_HOME to a folder that only you can write to"
        )
        return None


def distrusted(file: Mapping[str, Any]) -> str | None:
    """Return None for a file whose seal is right, else why it is not, to be put into brackets."""
    seal = _section(file, "environment").get("seal")
    if seal is None:
        return ""
    try:
        if hmac.compare_digest(str(seal).encode(), _hmac(file, _read_key()).encode()):
            return None
    except (OSError, RuntimeError) as error:
        return f" (its seal can't be checked: {error})"
    return " (its seal is of another user or machine, or of other code)"


def _hmac(tree: Mapping[str, Any], key: bytes) -> str:
    about = {setting: list(code.places) for setting, code in code_of(tree).items()}
    return hmac.new(key, json.dumps(about, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def key_file() -> Path:
    """Return the file of the user's key; RuntimeError without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return folder / "nemorl" / "key"


def _read_key() -> bytes:
    """Return the key. Raises OSError where there is none that is the user's alone."""
    path = key_file()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        private = stat.S_ISREG(info.st_mode) and not stat.S_IMODE(info.st_mode) & 0o077
        if not private or info.st_uid != os.geteuid():
            raise PermissionError(f"{path} must be a file that only you can read: remove it")
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} must hold {KEY_BYTES} bytes: remove it")
    return key


def _make_key() -> bytes:
    """Return the key, which is made on its first use."""
    path = key_file()
    with suppress(OSError):  # there is none, or another process writes it
        return _read_key()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(path.with_name(".lock")):
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
    return _read_key()

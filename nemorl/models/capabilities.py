"""What models can do here: the tested table, and what earlier checks found. Free of torch."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from nemorl.models.hub import has_own_code

Capability = Literal[
    "alone",
    "padded",
    "left_padded",
    "packed",
    "shared_prompts",
    "head",
    "recompute",
    "lora",
    "export",
    "cached",
    "fsdp",
    "tp",
    "cp",
]
CAPABILITIES: dict[Capability, str] = dict(
    zip(
        get_args(Capability),
        (
            "rows one by one, value and gradient",
            "rows padded on the right",
            "rows padded on the left",
            "packed rows",
            "prompts computed once for all their samples",
            "logits in chunks, at a temperature, and their entropy",
            "recomputation (activation_checkpointing)",
            "LoRA adapters, trained, merged, and read back by PEFT",
            "the exported folder, read back",
            "sampling with a cache of the past",
            "FSDP2 (parallel.dp_shard)",
            "tensor parallelism (parallel.tp)",
            "context parallelism (parallel.cp)",
        ),
        strict=True,
    )
)
TESTED = Path(__file__).with_name("tested.json")
"""Proofs by model type, and the versions that they are for, by docs/generate_models.py."""
PACKAGES = ("torch", "transformers", "torchtitan", "peft")
"""Those whose versions a proof is for."""


@dataclass(frozen=True)
class Proof:
    """Whether a capability holds: the largest difference from transformers, or why not."""

    holds: bool
    worst: float | None = None
    """Largest difference: of a log-probability, in nats, or of a gradient, relative."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.worst:.0e}" if self.holds and self.worst is not None else self.reason


Proofs = Mapping[Capability, Proof]
ASSUMED: Proofs = {name: Proof(True) for name in CAPABILITIES}
"""All capabilities, as a proof itself assumes them."""


def known(config: Any) -> Proofs | None:
    """Return what is proved of models with this configuration and the packages in use, by the
    tested table or an earlier check; None for a model that was not checked.
    """
    versions, table = _tested()
    # What is not installed computes nothing.
    same = all(versions[name] == own for name, own in versions_here().items() if own)
    if same and config.model_type in table:
        return table[config.model_type]
    file = _kept(config)
    return from_json(file.read_bytes()) if file and file.is_file() else None


def keep(config: Any, proofs: Proofs) -> None:
    if (file := _kept(config)) is None:
        return
    with suppress(OSError):  # they are found again
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(as_json(proofs), encoding="utf-8")
        aside.replace(file)


def as_json(proofs: Proofs) -> str:
    return json.dumps({name: asdict(proof) for name, proof in proofs.items()}, indent=1) + "\n"


def from_json(text: bytes) -> Proofs:
    return {name: Proof(**values) for name, values in json.loads(text).items()}


def versions_here() -> dict[str, str]:
    """Return the versions of PACKAGES, without the build (2.13.0 of 2.13.0+cpu); "" if missing."""
    return {name: _version(name).partition("+")[0] for name in PACKAGES}


@cache
def _tested() -> tuple[Mapping[str, str], Mapping[str, Proofs]]:
    found = json.loads(TESTED.read_bytes())
    return found["versions"], {
        kind: {name: Proof(**values) for name, values in proofs.items()}
        for kind, proofs in found["types"].items()
    }


def _kept(config: Any) -> Path | None:
    """None where the configuration's code can't be read."""
    code: list[str] = []
    if has_own_code(config):
        files = sorted(Path(config._name_or_path or "nowhere").glob("*.py"))
        code = [file.read_text(encoding="utf-8") for file in files]
        code = code or [getattr(config, "_commit_hash", None) or ""]
        if code == [""]:
            return None
    values = {name: x for name, x in config.to_dict().items() if name != "_name_or_path"}
    key = [values, code, versions_here(), _version("nemorl")]
    words = json.dumps(key, sort_keys=True, default=str)
    name = hashlib.sha256(words.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "nemorl" / "models" / f"{config.model_type}-{name}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

"""What models can do here: the tested table, the user's cache, and the tiny model on which a
capability is proved. Free of torch.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

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
            "LoRA adapters, trained and merged",
            "the exported folder, read back",
            "sampling with a cache of the past",
            "FSDP2 (parallel.dp_shard)",
            "tensor parallelism (parallel.tp)",
            "context parallelism (parallel.cp)",
        ),
        strict=True,
    )
)
"""Capabilities, and what each is."""
TESTED = Path(__file__).with_name("tested.json")
"""Proofs by model type, written by docs/generate_models.py and tested."""
PACKAGES = ("torch", "transformers", "torchtitan", "peft")
"""Packages whose versions a proof is for."""


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
    """Return what is proved of models with a Hugging Face configuration: by the tested table, or
    kept from an earlier check with these versions; None for a model that was not checked.
    """
    found = _tested().get(config.model_type)
    if found is None and (file := _kept(config)).is_file():
        found = from_json(file.read_bytes())
    return found


def keep(config: Any, proofs: Proofs) -> None:
    """Keep proofs for later runs of this user."""
    file = _kept(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(as_json(proofs), encoding="utf-8")
    aside.replace(file)


def as_json(proofs: Proofs) -> str:
    """Return proofs as JSON text."""
    return json.dumps({name: asdict(proof) for name, proof in proofs.items()}, indent=1) + "\n"


def from_json(text: bytes) -> Proofs:
    """Return proofs from what `as_json` gives."""
    return {name: Proof(**values) for name, values in json.loads(text).items()}


@cache
def _tested() -> Mapping[str, Proofs]:
    if not TESTED.is_file():
        return {}
    table = json.loads(TESTED.read_bytes())
    return {
        kind: {name: Proof(**values) for name, values in proofs.items()}
        for kind, proofs in table.items()
    }


def _kept(config: Any) -> Path:
    """Return the file of a configuration's proofs, with these versions of packages."""
    values = {name: x for name, x in config.to_dict().items() if name not in ("_name_or_path",)}
    words = json.dumps([values, {name: _version(name) for name in PACKAGES}, _version("nemorl")])
    name = hashlib.sha256(words.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "nemorl" / "models" / f"{config.model_type}-{name}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

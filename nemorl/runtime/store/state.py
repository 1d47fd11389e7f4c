"""A run as its callbacks see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.rollout.admission import LoopState
from nemorl.rollout.generation import GenerationBackend

POLICY = "policy"
"""The name of the backend that is `run.trainer`."""


@dataclass(frozen=True)
class Run:
    """A run as its callbacks see it: read only."""

    config: Any
    """Such as a GRPOConfig."""
    trainer: Any
    """The policy: a TrainingBackend, perhaps a full one."""
    generator: GenerationBackend | None
    tokenizer: Any
    state: LoopState
    directory: Path | None = None
    """None: nothing is written."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """The other backends that train, by name."""

    @property
    def backends(self) -> dict[str, Any]:
        """All backends that train, by name: the ones in a checkpoint."""
        return {POLICY: self.trainer, **self.others}

    @property
    def updates(self) -> int:
        return sum(backend.step for backend in self.backends.values())

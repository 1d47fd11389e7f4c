"""The state of a loop, and a run as its callbacks see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.rollout.generation import GenerationBackend


@dataclass(frozen=True)
class LoopState:
    """The state of a loop besides the trainer and the random generators.

    >>> LoopState(seed=3).advance({"train": 64})
    LoopState(seed=3, step=1, cursors={'train': 64})
    """

    seed: int
    step: int = 0
    """Finished steps: rollout batches in RL, optimizer steps in SFT."""
    cursors: Mapping[str, int] = field(default_factory=dict)
    """Rows taken so far from each seeded order, by name, through all epochs."""

    def advance(self, cursors: Mapping[str, int]) -> "LoopState":
        """Return the state after a step."""
        return LoopState(self.seed, self.step + 1, dict(cursors))


@dataclass(frozen=True)
class Run:
    """A run as its callbacks see it: read only."""

    config: Any
    """Such as a GRPOConfig."""
    trainer: Any
    """A TrainingBackend, perhaps a full one."""
    generator: GenerationBackend | None
    tokenizer: Any
    state: LoopState
    directory: Path | None = None
    """None: nothing is written."""

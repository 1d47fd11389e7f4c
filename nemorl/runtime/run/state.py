"""The state of a loop, and a run as its callbacks see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemorl.data.digest import Digest
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
    data: Sequence[Digest] = field(default_factory=list, repr=False)
    """Of the data sets to train and to validate on."""

    def advance(self, cursors: Mapping[str, int]) -> "LoopState":
        """Return the state after a step."""
        return replace(self, step=self.step + 1, cursors=dict(cursors))


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

"""The state of a loop, and a run as its callbacks see it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.parallel.backend import TrainingBackend
from nemorl.rollout.generation import GenerationBackend


@dataclass(frozen=True)
class LoopState:
    """The state of a loop besides the trainer and the random generators.

    >>> LoopState(seed=3).advance(rows=64)
    LoopState(seed=3, step=1, cursor=64, policy_version=1)
    """

    seed: int
    step: int = 0
    """Finished steps: rollout batches in RL, optimizer steps in SFT."""
    cursor: int = 0
    """Rows taken from the seeded order so far, through all epochs."""
    policy_version: int = 0
    """How often the weights have changed."""

    def advance(self, *, rows: int, updates: int = 1) -> "LoopState":
        """Return the state after a step."""
        return LoopState(
            self.seed, self.step + 1, self.cursor + rows, self.policy_version + updates
        )

    def epoch(self, num_rows: int) -> int:
        """Return how often all rows have been taken.

        >>> LoopState(seed=0, cursor=250).epoch(num_rows=100)
        2
        """
        return self.cursor // num_rows


@dataclass(frozen=True)
class Run:
    """A run as its callbacks see it: read only."""

    config: Any
    """Such as a GRPOConfig."""
    trainer: TrainingBackend
    generator: GenerationBackend | None
    tokenizer: Any
    state: LoopState
    directory: Path | None = None
    """None: nothing is written."""

"""The state of a loop (`LoopState`), and a run as its callbacks see it (`Run`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from nemorl.parallel.backend import TrainingBackend
from nemorl.rollout.generation import GenerationBackend


@dataclass(frozen=True)
class LoopState:
    """The state of a loop besides the trainer and the random generators; a new value each step.

    >>> LoopState(seed=3).advance(rows=64)
    LoopState(seed=3, step=1, cursor=64, policy_version=1)
    """

    seed: int
    step: int = 0
    """Finished steps: rollout batches in RL, optimizer steps in SFT."""
    cursor: int = 0
    """Rows taken from the seeded order so far, through all epochs."""
    policy_version: int = 0
    """How often the weights that generate have changed."""

    def advance(self, *, rows: int, updates: int = 1) -> "LoopState":
        """Return the state after a step of `rows` rows and `updates` changes of the weights."""
        return LoopState(
            self.seed, self.step + 1, self.cursor + rows, self.policy_version + updates
        )

    def epoch(self, num_rows: int) -> int:
        """Return how often all of `num_rows` rows have been taken.

        >>> LoopState(seed=0, cursor=250).epoch(num_rows=100)
        2
        """
        return self.cursor // num_rows

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoopState":
        """Return the inverse of `to_dict`. Raises ValueError for other fields or no integers.

        >>> LoopState.from_dict({"seed": 0, "step": 5, "cursor": 40, "policy_version": 5}).step
        5
        """
        names = [field.name for field in fields(cls)]
        if sorted(values) != sorted(names):
            raise ValueError(
                f"a loop state must have exactly the fields {', '.join(names)}, but it has"
                f" {', '.join(sorted(values)) or 'none'}"
            )
        for name in names:
            if type(values[name]) is not int:
                raise ValueError(
                    f"{name} of a loop state must be an integer, but it is {values[name]!r}"
                )
        return cls(**values)


@dataclass(frozen=True)
class Run:
    """A run as its callbacks see it: read only."""

    config: Any
    """The frozen configuration, SFTConfig or GRPOConfig."""
    trainer: TrainingBackend
    generator: GenerationBackend | None
    tokenizer: Any
    state: LoopState
    directory: Path | None = None
    """None: nothing is written."""


pytree.register_dataclass(LoopState, field_names=[field.name for field in fields(LoopState)])

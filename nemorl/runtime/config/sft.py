"""The settings of SFT."""

from dataclasses import dataclass, field
from typing import Any, Literal

from nemorl.checks import at_least
from nemorl.runtime.config.base import BaseConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning on demonstrations."""

    train_global_batch_size: int = 32
    """Sequences per optimizer step."""
    max_num_steps: int | None = None
    """Number of optimizer steps. None: as num_epochs says."""
    num_epochs: int = 1
    """Passes over the data if max_num_steps is not given."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weighting of the loss: every token counts the same, or every sequence."""
    reward: str | tuple[str, ...] = "exact_match"
    """Reward that judges greedy answers to validation rows with an answer: exact_match
    (or a known data set's), contains_answer, last_number, math, choice, think_format, code,
    ifeval, reasoning_gym, or module:function of your own.
    """
    reward_weights: tuple[float, ...] = ()
    """Weight of each of several rewards. Default: 1."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of parameters of the rewards, by name: {tolerance: 0.01}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_replay()
        at_least(
            1,
            train_global_batch_size=self.train_global_batch_size,
            max_num_steps=self.max_num_steps,
            num_epochs=self.num_epochs,
        )

    def planned_steps(self, num_rows: int) -> int:
        """Return `max_num_steps`, or the number of whole batches in `num_epochs`, at least 1."""
        whole = self.num_epochs * num_rows // self.train_global_batch_size
        return self.max_num_steps or max(1, whole)

    def generates(self, *, answers: bool) -> bool:
        """Return whether there are questions to validate on."""
        return answers

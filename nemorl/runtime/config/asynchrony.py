"""The section `async`: sampling that goes on while the trainer steps."""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import at_least, require


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Sampling that goes on while the trainer steps (docs/asynchrony.md)."""

    max_staleness: int = 0
    """Steps by which a token's weights may be older than the step that trains on it. 0: each step
    samples with its own weights, and the trainer waits.
    """
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What new weights do with unfinished responses. keep: they go on with the new weights; wait:
    they end with the old ones first, and nothing begins meanwhile; abort: they are drawn again.
    """

    def __post_init__(self) -> None:
        at_least(0, async__max_staleness=self.max_staleness)
        require(
            self.max_staleness > 0 or self.in_flight == "keep",
            "async.in_flight",
            "is for async.max_staleness of 1 or more",
            self.in_flight,
            "add --async.max-staleness 1, or remove it",
        )

"""The section `receipts`."""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import require


@dataclass(frozen=True, kw_only=True)
class ReceiptsConfig:
    """What a run proves of itself in every step (docs/receipts.md)."""

    on_failure: Literal["stop", "warn"] = "stop"
    """What happens where a receipt does not hold: the run ends with an error, or warns."""
    support: float | None = 0.02
    """Where top_p, top_k or min_p are on: largest distance from 1 of the mean of
    π_trainer/π_sampler, beyond four standard errors. None: it is measured only.
    """

    def __post_init__(self) -> None:
        require(
            self.support is None or self.support > 0,
            "receipts.support",
            "must be above 0 or None",
            self.support,
            "0.02 allows 2 %",
        )

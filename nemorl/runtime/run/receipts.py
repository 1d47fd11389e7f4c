"""What happens where a receipt does not hold: the run stops, or warns."""

from collections import Counter

from nemorl.checks import warn
from nemorl.runtime.config.grpo import ReceiptsConfig

FAILED = "does not hold"
"""In the error or warning of each receipt that does not."""


class ReceiptError(RuntimeError):
    """Raised where a receipt does not hold."""


class Receipts:
    """Stops a run, or warns, as `receipts.on_failure` says."""

    def __init__(self, config: ReceiptsConfig) -> None:
        self.config = config
        self._failures = Counter[str]()

    def require(self, holds: bool, name: str, step: int, found: str, remedy: str) -> None:
        """Raise ReceiptError unless a receipt holds, or warn of the first, second, fourth, … such
        step.
        """
        if holds:
            return
        self._failures[name] += 1
        message = f"step {step}: the receipt {name} {FAILED}: {found}. {remedy}"
        if self.config.on_failure == "stop":
            go_on = "--receipts.on-failure warn continues in spite of it"
            raise ReceiptError(f"{message}; {go_on}.")
        if (count := self._failures[name]).bit_count() == 1:
            warn(f"{message}; {count} such steps so far (receipts.on_failure is warn).")

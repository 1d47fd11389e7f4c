"""How the processes of a run on several devices are started and watched: frozen, free of torch,
checked when made.
"""

from dataclasses import dataclass
from typing import Literal

from nemorl.checks import at_least, require

WEEK_S = 604_800
"""Longer than any call, and no more than clocks of collectives can count."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Where the ranks of a run on several devices come from, and what happens when one fails.

    Under torchrun the ranks are its processes.
    """

    launcher: Literal["auto", "processes", "ray"] = "auto"
    """processes: ranks on this machine, even one alone; ray: on the cluster at RAY_ADDRESS, or
    here. auto: ray if that is set, else processes.
    """
    max_restarts: int = 0
    """How often the run may go on from its last checkpoint, with new ranks, after one has died or
    hung; 0: such a failure ends it.
    """
    timeout_s: float = 1800.0
    """How long the ranks may take for one call, such as an optimizer step, in seconds; then they
    count as hung, and are ended.
    """
    start_timeout_s: float = 600.0
    """How long the ranks may take to start and to load the model, in seconds."""
    cpus_per_rank: int = 1
    """CPU cores of each rank; where there is no GPU, it computes with as many threads."""

    def __post_init__(self) -> None:
        at_least(0, runtime__max_restarts=self.max_restarts)
        at_least(1, runtime__cpus_per_rank=self.cpus_per_rank)
        for name in ("timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            require(
                seconds > 0, f"runtime.{name}", "must be positive", seconds, "600 is ten minutes"
            )
            require(
                seconds <= WEEK_S,
                f"runtime.{name}",
                f"must be at most {WEEK_S}, a week",
                seconds,
                "86400 is a day",
            )

"""The section `runtime`."""

from dataclasses import dataclass

from nemorl.checks import at_least, require

WEEK_S = 604_800
"""No more than the clocks of collectives can count."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the ranks of a run on several devices are run and watched."""

    max_restarts: int = 0
    """Restarts from the last checkpoint, with new ranks, after one has died or hung."""
    timeout_s: float = 1800.0
    """Longest call of the ranks, such as an optimizer step, in seconds; then they count as hung."""
    start_timeout_s: float = 600.0
    """Longest start of a local Ray, and of the ranks, model included, in seconds."""
    cpus_per_rank: int = 1
    """CPU cores of each rank; without a GPU, its number of threads."""
    tp_across_nodes: bool = False
    """Let the devices of a parallel.tp group be on several machines, where none has enough."""
    oversubscribe: bool = False
    """Start more ranks than this machine has cores for, which then take turns: for tests."""

    def __post_init__(self) -> None:
        at_least(0, runtime__max_restarts=self.max_restarts)
        at_least(
            1,
            runtime__cpus_per_rank=self.cpus_per_rank,
            runtime__timeout_s=self.timeout_s,
            runtime__start_timeout_s=self.start_timeout_s,
        )
        for name in ("timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            require(
                seconds <= WEEK_S,
                f"runtime.{name}",
                f"must be at most {WEEK_S}, a week",
                seconds,
                "86400 is a day",
            )

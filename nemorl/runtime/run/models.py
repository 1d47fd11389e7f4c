"""Backends beside the policy: what a run was asked for, and what it has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from nemorl.checks import require
from nemorl.parallel.config import OptimizerConfig
from nemorl.runtime.store.checkpoint import backends_of
from nemorl.runtime.store.state import POLICY


@dataclass(frozen=True, kw_only=True)
class BackendOrder:
    """What `Run.backend` was asked for."""

    name: str
    model: str | Path | nn.Module | None
    head: Literal["lm", "scalar"]
    trains: bool
    optimizer: OptimizerConfig | None
    own_ranks: bool = False
    initial: nn.Module | None = None
    """A copy of the policy's model, where that was given in memory, to begin with."""


def require_length(schedule: str, num_updates: int | None) -> None:
    """Refuse a schedule over an unknown number of steps."""
    require(
        schedule == "constant" or num_updates is not None,
        "optimizer.schedule",
        "must be constant where no setting says how long the run is",
        schedule,
        "give nemorl.open_run num_updates=…, or the config a field max_num_steps",
    )


class Models:
    """Backends beside the policy, by name: `trained` ones, which checkpoints hold, and `frozen`."""

    def __init__(self, schedule: str, num_updates: int | None) -> None:
        require_length(schedule, num_updates)
        self.trained: dict[str, Any] = {}
        self.frozen: dict[str, Any] = {}
        self.schedule = schedule
        """The policy's schedule of the learning rate; if it is constant, another model's."""

    @property
    def all(self) -> list[Any]:
        return [*self.trained.values(), *self.frozen.values()]

    def check(self, order: BackendOrder, *, begun: bool, num_updates: int | None) -> None:
        """Raise ValueError for what can't be ordered now."""
        taken = [POLICY, *self.trained, *self.frozen]
        require(
            order.name.isidentifier() and order.name not in taken,
            "name",
            f"must be a Python name, and none of {', '.join(taken)}, which are taken",
            order.name,
            "choose another; the policy is run.trainer",
        )
        require(
            not (order.trains and begun),
            "run.backend",
            "must be called before the first step for a backend that trains",
            order.name,
            "move it above the loop",
        )
        require(
            order.trains or order.optimizer is None,
            "optimizer",
            "must be None for a backend that does not train",
            order.optimizer,
            "omit it, or trains=False",
        )
        if order.optimizer is not None:
            require_length(order.optimizer.schedule, num_updates)

    def add(self, order: BackendOrder, backend: Any) -> Any:
        if order.optimizer is not None and self.schedule == "constant":
            self.schedule = order.optimizer.schedule
        (self.trained if order.trains else self.frozen)[order.name] = backend
        return backend

    def remove(self, name: str) -> None:
        known = ", ".join(self.frozen) or "none"
        requirement = f"must name a backend that does not train ({known})"
        require(name in self.frozen, "name", requirement, name, "give the name it was made with")
        del self.frozen[name]

    def require_all_of(self, checkpoint: Path | None) -> None:
        """Raise ValueError where a checkpoint holds a backend that the run has not asked for."""
        here = sorted([POLICY, *self.trained])
        found = [] if checkpoint is None else backends_of(checkpoint)
        forgotten = [name for name in found if name not in here]
        calls = (
            f'omit trains=False of run.backend("{name}")'
            if name in self.frozen
            else f'call run.backend("{name}")'
            for name in forgotten
        )
        require(
            not forgotten,
            "run.backend",
            f"must be called for each backend that {checkpoint} holds, to train it on",
            here,
            ", ".join(calls),
        )

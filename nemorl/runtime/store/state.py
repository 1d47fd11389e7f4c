"""The state of a loop, and what callbacks may read of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nemorl.checks import require
from nemorl.data.digest import Digest
from nemorl.data.rows import RowOrder, StreamedRows
from nemorl.parallel.backend import FullTrainingBackend
from nemorl.runtime.config.base import BaseConfig

POLICY = "policy"
"""The name of the backend that is `run.trainer`."""


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A prompt that was taken, and that no finished step has trained on."""

    ordinal: int
    """Number of the group in the run."""
    stream: str
    """Name of the order that the prompt was taken from."""
    row: int
    """Index of its row there."""
    step: int | None = None
    """Step that trains on it. None: it is in flight, or, not `sampled`, a resumed run has yet to
    take it again.
    """
    sampled: bool = False
    """Whether its responses were asked for."""

    @property
    def waits(self) -> bool:
        return self.step is None and not self.sampled


@dataclass(frozen=True)
class LoopState:
    """The state of a loop besides the trainer and the random generators.

    A group is the n-th of the run, whatever step trains on it: its responses are sampled from
    `derive_seed(seed, n)`.

    >>> state, groups = LoopState(3).take_groups("train", RowOrder(sizes=(9,)), 2, step=1)
    >>> [group.ordinal for group in groups], state.groups, state.advance().open_groups
    ([0, 1], 2, ())
    """

    seed: int
    step: int = 0
    """Finished steps: rollout batches in RL, optimizer steps in SFT."""
    cursors: Mapping[str, int] = field(default_factory=dict)
    """Rows taken so far from each seeded order, by name, through all epochs."""
    groups: int = 0
    """Groups numbered so far."""
    open_groups: tuple[OpenGroup, ...] = ()
    """Groups taken and not yet trained on, by number."""
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups that the present step takes and does not train on, by reason."""
    data: Sequence[Digest] = field(default_factory=list, repr=False)
    """Digests of the data sets to train and to validate on."""

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> "LoopState":
        """Return a state from a checkpoint's JSON: its open groups wait to be taken again."""
        again = {"step": None, "sampled": False}
        groups = tuple(OpenGroup(**{**group, **again}) for group in saved["open_groups"])
        return cls(**{**saved, "open_groups": groups})

    def take(
        self, name: str, order: RowOrder | StreamedRows, count: int
    ) -> tuple["LoopState", list[int]]:
        """Return the state after the next `count` rows of an order, and their indices."""
        cursor = self.cursors.get(name, 0)
        cursors = {**self.cursors, name: cursor + count}
        return replace(self, cursors=cursors), order.take(cursor, count)

    def take_groups(
        self, name: str, order: RowOrder | StreamedRows, count: int, *, step: int | None
    ) -> tuple["LoopState", list[OpenGroup]]:
        """Return the state after the next `count` prompts of an order, and their groups, open until
        `step` ends; None: sampled for a step that is not known yet. Those that wait come first.
        """
        waiting = [g for g in self.open_groups if g.stream == name and g.waits][:count]
        state, rows = self.take(name, order, count - len(waiting))
        numbers = range(self.groups, self.groups + len(rows))
        new = [
            OpenGroup(ordinal=n, stream=name, row=row) for n, row in zip(numbers, rows, strict=True)
        ]
        sampled = step is None
        taken = [replace(group, step=step, sampled=sampled) for group in (*waiting, *new)]
        return replace(state, groups=numbers.stop)._with(taken), taken

    def sample(self, groups: Sequence[int], count: int) -> tuple["LoopState", list[int]]:
        """Return the state after `count` prompts were sampled, and the numbers of their groups.

        groups: theirs, or none. A prompt gets a new one if its own was sampled or closed before.
        """
        fresh = {group.ordinal: group for group in self.open_groups if not group.sampled}
        found, sampled, next_number = list[int](), list[OpenGroup](), self.groups
        for number in groups or [-1] * count:
            if number in fresh:
                sampled.append(replace(fresh.pop(number), sampled=True))
                found.append(number)
            else:
                here = self.step + 1
                own = OpenGroup(ordinal=next_number, stream="", row=-1, step=here, sampled=True)
                sampled.append(own)
                found.append(next_number)
                next_number += 1
        return replace(self, groups=next_number)._with(sampled), found

    def assign(self, groups: Sequence[int]) -> "LoopState":
        """Return the state in which the present step trains on groups that were in flight."""
        numbers, step = {*groups}, self.step + 1
        return self._with([replace(g, step=step) for g in self.open_groups if g.ordinal in numbers])

    def drop(self, groups: Sequence[int], reason: str) -> "LoopState":
        """Return the state in which no step trains on groups.

        Raises: ValueError for groups that are not open: they would be counted twice.
        """
        numbers = {*groups}
        closed = numbers - {group.ordinal for group in self.open_groups}
        must = "must be open: neither dropped nor of a step that has ended"
        remedy = "drop rollouts once, in the step that sampled them"
        require(not closed, "groups to drop", must, sorted(closed), remedy)
        left = tuple(g for g in self.open_groups if g.ordinal not in numbers)
        counted = (*self.dropped.get(reason, ()), *dict.fromkeys(groups))
        dropped = {**self.dropped, reason: counted}
        return replace(self, open_groups=left, dropped=dropped)

    def closing(self) -> list[OpenGroup]:
        return [g for g in self.open_groups if g.step is not None and g.step <= self.step + 1]

    def advance(self) -> "LoopState":
        """Return the state after a step, which closes its groups."""
        closed = {g.ordinal for g in self.closing()}
        still_open = tuple(g for g in self.open_groups if g.ordinal not in closed)
        return replace(self, step=self.step + 1, open_groups=still_open, dropped={})

    def _with(self, groups: Sequence[OpenGroup]) -> "LoopState":
        found = {group.ordinal: group for group in (*self.open_groups, *groups)}
        return replace(self, open_groups=tuple(found[number] for number in sorted(found)))


@runtime_checkable
class RunView(Protocol):
    """What a callback may read of a run."""

    @property
    def config(self) -> BaseConfig: ...

    @property
    def trainer(self) -> FullTrainingBackend:
        """The policy. A backend with few methods raises AttributeError for the others."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def state(self) -> LoopState: ...

    @property
    def directory(self) -> Path: ...

    @property
    def backends(self) -> Mapping[str, FullTrainingBackend]:
        """All backends that train, by name, the policy first: the ones in a checkpoint."""

    @property
    def updates(self) -> int:
        """Optimizer steps of all of them."""

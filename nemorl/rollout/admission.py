"""The state of a loop, with one record for each group of responses, and the pure decision which
groups begin and which ones a step trains on.

Groups of a stream begin, and are trained on, in the order of their ordinals. The group at place p
of the ones that no step has yet is trained on p // batch steps from now; it begins once the engines
have weights that will be at most `staleness` steps old by then. So each step trains on the prompts
of the synchronous run, which is staleness 0: groups begin when their step asks for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemorl.checks import require
from nemorl.data.digest import Digest
from nemorl.data.rows import RowOrder, StreamedRows

STALE = "stale"
"""Why a group is dropped that began too many steps ago."""
Order = RowOrder | StreamedRows


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt that was taken, and whose step has not ended."""

    ordinal: int
    """Number of the group in the run."""
    stream: str
    """Name of the order that the prompt was taken from."""
    row: int
    """Index of its row there."""
    step: int | None = None
    """Step that trains on it; None: not known yet."""
    state: Literal["waiting", "taken", "running", "ended", "given"] = "taken"
    """waiting: a resumed run has yet to take it again. taken: not begun. running: it is being
    sampled. ended: they wait for their step. given: a step has them.
    """
    begun: int = 0
    """Finished steps that the engines' weights included when it began to run."""


@dataclass(frozen=True)
class LoopState:
    """The state of a loop besides the trainer and the random generators.

    Group n of the run is sampled from `derive_seed(seed, n)`, whatever step trains on it.

    >>> state, groups = LoopState(3).take_groups("train", RowOrder(sizes=(9,)), 2, step=1)
    >>> [group.ordinal for group in groups], state.groups, state.advance()[0].open_groups
    ([0, 1], 2, ())
    """

    seed: int
    step: int = 0
    """Finished steps: rollout batches in RL, optimizer steps in SFT."""
    cursors: Mapping[str, int] = field(default_factory=dict)
    """Rows taken so far from each order, by name, through all epochs."""
    groups: int = 0
    """Groups numbered so far."""
    open_groups: tuple[Group, ...] = ()
    """Groups taken and not yet trained on, by ordinal."""
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups that the present step takes and does not train on, by reason."""
    data: Sequence[Digest] = field(default_factory=list, repr=False)
    """Digests of the data sets to train and to validate on."""
    synced: int = field(default=0, compare=False)
    """Finished steps that the engines' weights include; not saved, like what follows."""
    asked: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Groups for which the present step still waits, by stream."""

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> "LoopState":
        """Return a state from a checkpoint's JSON: its open groups wait to be taken again."""
        groups = tuple(
            Group(ordinal=each["ordinal"], stream=each["stream"], row=each["row"], state="waiting")
            for each in saved["open_groups"]
        )
        return cls(**{**saved, "open_groups": groups})

    def saved(self) -> dict[str, Any]:
        groups = []
        for group in self.open_groups:
            found = {name: getattr(group, name) for name in ("ordinal", "stream", "row", "step")}
            groups.append({**found, "sampled": group.state not in ("waiting", "taken")})
        names = ("seed", "step", "cursors", "groups", "open_groups", "dropped", "data")
        return {**{name: getattr(self, name) for name in names}, "open_groups": groups}

    def take(self, name: str, order: Order, count: int) -> tuple["LoopState", list[int]]:
        """Return the state after the next `count` rows of an order, and their indices."""
        cursor = self.cursors.get(name, 0)
        cursors = {**self.cursors, name: cursor + count}
        return replace(self, cursors=cursors), order.take(cursor, count)

    def take_groups(
        self, name: str, order: Order, count: int, *, step: int | None = None
    ) -> tuple["LoopState", list[Group]]:
        """Return the state after the next `count` prompts of an order, and their groups, open until
        `step` ends; the ones that a resumed run has yet to take again come first.
        """
        again = [g for g in self.open_groups if (g.stream, g.state) == (name, "waiting")][:count]
        state, rows = self.take(name, order, count - len(again))
        new = [Group(ordinal=n, stream=name, row=row) for n, row in enumerate(rows, self.groups)]
        taken = [replace(group, step=step, state="taken") for group in (*again, *new)]
        return replace(state, groups=self.groups + len(rows)).put(taken), taken

    def drop(self, groups: Sequence[int], reason: str) -> "LoopState":
        """Return the state in which no step trains on groups. Raises: ValueError for groups that
        are not open.
        """
        numbers = {*groups}
        closed = numbers - {group.ordinal for group in self.open_groups}
        require(
            not closed,
            "groups to drop",
            "must be open: neither dropped nor of a step that has ended",
            sorted(closed),
            "drop rollouts once, in the step that sampled them",
        )
        left = tuple(g for g in self.open_groups if g.ordinal not in numbers)
        counted = (*self.dropped.get(reason, ()), *dict.fromkeys(groups))
        return replace(self, open_groups=left, dropped={**self.dropped, reason: counted})

    def advance(self) -> tuple["LoopState", dict[str, Any]]:
        """Return the state after the present step, which closes its groups, and the ordinals of the
        ones that it trained on, that were dropped, by reason, and that stay open.
        """
        here = self.step + 1
        ends = [g for g in self.open_groups if g.step is not None and g.step <= here]
        left = tuple(g for g in self.open_groups if g.step is None or g.step > here)
        missed = tuple(group.ordinal for group in ends if group.state == "taken")
        found = {
            "trained": [group.ordinal for group in ends if group.state == "given"],
            "dropped": {**self.dropped, **({"taken by hand": missed} if missed else {})},
            "open": [group.ordinal for group in left],
        }
        return replace(self, step=here, open_groups=left, dropped={}, asked={}), found

    def ahead(self, stream: str) -> list[Group]:
        """Return the groups that run or have ended, and that no step has yet."""
        states = ("running", "ended")
        return [g for g in self.open_groups if g.stream == stream and g.state in states]

    def put(self, groups: Sequence[Group]) -> "LoopState":
        """Return the state with these records, in place of those of the same ordinals."""
        found = {group.ordinal: group for group in (*self.open_groups, *groups)}
        return replace(self, open_groups=tuple(found[number] for number in sorted(found)))


@dataclass(frozen=True)
class Wanted:
    """The present step asks for groups."""

    count: int


@dataclass(frozen=True)
class Ended:
    """The conversations of groups have ended."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True)
class Updated:
    """The engines have the weights of all steps that have ended."""

    again: bool = False
    """Aborted groups are drawn again."""


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What is to be done, in this order."""

    stop: tuple[int, ...] = ()
    begin: tuple[Group, ...] = ()
    """Begin groups, or draw aborted ones again."""
    give: tuple[int, ...] = ()


def decide(
    state: LoopState,
    event: Wanted | Ended | Updated,
    *,
    stream: str,
    order: Order,
    batch: int,
    staleness: int,
    last: int | None = None,
) -> tuple[LoopState, Actions]:
    """Return the state after an event, and what is to be done.

    batch: groups of a step. staleness: most steps by which a token may be older than the step that
    trains on it. last: the run's last step, for which groups begin at most (None: no end).
    Raises: ValueError for a group that does not run.

    >>> settings = dict(stream="train", order=RowOrder(sizes=(9,)), batch=2, staleness=1)
    >>> state, actions = decide(LoopState(0), Updated(), **settings)
    >>> [group.ordinal for group in actions.begin]  # two to train on now, two for the next step
    [0, 1, 2, 3]
    >>> state, _ = decide(state, Wanted(2), **settings)
    >>> [decide(state, Ended(ended), **settings)[1].give for ended in ((1,), (0, 1))]
    [(), (0, 1)]
    """
    begin = list[Group]()
    running = [group for group in state.ahead(stream) if group.state == "running"]
    match event:
        case Wanted(count):
            asked = state.asked.get(stream, 0) + count
            state = replace(state, asked={**state.asked, stream: asked})
        case Ended(ordinals):
            ended = [replace(g, state="ended") for g in running if g.ordinal in ordinals]
            require(
                len(ended) == len(ordinals), "groups", "must be running", ordinals, "end each once"
            )
            state = state.put(ended)
        case Updated(again):
            state = replace(state, synced=state.step)
            begin += [replace(g, begun=state.synced) for g in running if again]
            state = state.put(begin)
    oldest = state.step - staleness
    if stale := tuple(g.ordinal for g in state.ahead(stream) if g.begun < oldest):
        state = state.drop(stale, STALE)
    wanted = state.asked.get(stream, 0)
    # A step that has not asked yet will train on `batch`.
    present = wanted if stream in state.asked or not staleness else batch
    ends = state.synced + staleness if last is None else min(state.synced + staleness, last - 1)
    if ends >= state.step:
        count = present + (ends - state.step) * batch - len(state.ahead(stream))
        if count > 0:
            state, new = state.take_groups(stream, order, count)
            begin += new
    begin = [replace(g, state="running", begun=state.synced) for g in begin]
    state = state.put(begin)
    first = state.ahead(stream)[:wanted]
    give: tuple[int, ...] = ()
    if wanted and len(first) == wanted and all(group.state == "ended" for group in first):
        give = tuple(group.ordinal for group in first)
        state = state.put([replace(g, state="given", step=state.step + 1) for g in first])
        state = replace(state, asked={**state.asked, stream: 0})
    return state, Actions(stop=stale, begin=tuple(begin), give=give)

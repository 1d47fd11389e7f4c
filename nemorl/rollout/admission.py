"""Which groups of responses begin, and which ones a step trains on: pure decisions.

It knows no engine, clock or thread: `nemorl.runtime.run.groups` feeds it events and executes its
actions.

Groups are numbered, begin in this order, and are trained on in this order. The group at place p of
the ones that are not trained on yet is trained on p // batch steps from now; it begins once the
engines have weights that will be at most `staleness` steps old by then. So a slow group is never
overtaken, none becomes too old, and each step trains on the prompts of the synchronous run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STALE = "stale"
"""Why a group is dropped that began too many steps ago."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group that has begun, and that no step has trained on."""

    number: int
    begun: int
    """Finished steps that the engines' weights included when it began."""
    done: bool = False
    handed: bool = False
    """Whether the present step trains on it."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Groups in flight, and what may begin."""

    staleness: int
    """Most steps by which a token may be older than the step that trains on it."""
    batch: int
    """Groups of a step."""
    last: int | None = None
    """Steps of the whole run: nothing begins that no step will train on. None: no end."""
    step: int = 0
    """Finished steps."""
    version: int = 0
    """Finished steps that the engines' weights include."""
    next_number: int = 0
    """Number of the group that begins next."""
    open: tuple[Group, ...] = ()
    """Groups that have begun, in order."""
    wanted: int = 0
    """Groups that the present step waits for."""
    served: bool = False
    """Whether the present step has been given groups."""

    def __post_init__(self) -> None:
        assert self.staleness >= 0 and self.batch >= 1

    @property
    def trains_next(self) -> int:
        """The step, from 0, that will train on a group that begins now."""
        present = sum(group.handed for group in self.open) + self.wanted
        first = present if self.served else max(self.batch, present)
        place = len(self.open)
        ahead = 0 if place < first else 1 + (place - first) // self.batch
        return self.step + ahead

    @property
    def may_begin(self) -> bool:
        step = self.trains_next
        ends = self.last is not None and step >= self.last
        return step - self.version <= self.staleness and not ends


@dataclass(frozen=True)
class Wanted:
    """The present step asks for groups; `Hand` answers."""

    count: int


@dataclass(frozen=True)
class Finished:
    """A group's conversations have ended."""

    number: int


@dataclass(frozen=True)
class Dropped:
    """Groups are not trained on, as ones that teach nothing; later ones take their places."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """The present step has trained on all groups that were handed to it, and ends."""


@dataclass(frozen=True)
class Updated:
    """The engines have the weights of all steps that have ended."""

    again: bool = False
    """What was in flight was aborted, and is drawn again."""


Event = Wanted | Finished | Dropped | Trained | Updated


@dataclass(frozen=True)
class Begin:
    """Begin the group of this number: of the next prompt, or again of its own."""

    number: int


@dataclass(frozen=True)
class Drop:
    """Stop a group, and train on a later one in its place."""

    number: int
    reason: str


@dataclass(frozen=True)
class Hand:
    """Give the present step the groups that it asked for."""

    numbers: tuple[int, ...]


Action = Begin | Drop | Hand


def decide(state: Admission, event: Event) -> tuple[Admission, tuple[Action, ...]]:
    """Return the state after an event, and what is to be done, in order.

    Raises: ValueError for a group that is not open, or that has ended before.

    >>> state, actions = decide(Admission(staleness=1, batch=2), Wanted(2))
    >>> actions  # two to train on now, and two for the next step
    (Begin(number=0), Begin(number=1), Begin(number=2), Begin(number=3))
    >>> state, actions = decide(state, Finished(1))
    >>> actions  # in order: group 0 is not done
    ()
    >>> decide(state, Finished(0))[1]
    (Hand(numbers=(0, 1)),)
    """
    state, actions = _noted(state, event)
    state, dropped = _without_stale(state)
    begun = list[Action]()
    while state.may_begin:
        group = Group(number=state.next_number, begun=state.version)
        state = replace(state, open=(*state.open, group), next_number=group.number + 1)
        begun.append(Begin(group.number))
    waiting = [group for group in state.open if not group.handed][: state.wanted]
    handed: tuple[Action, ...] = ()
    if state.wanted and len(waiting) == state.wanted and all(group.done for group in waiting):
        numbers = {group.number for group in waiting}
        changed = tuple(
            replace(group, handed=True) if group.number in numbers else group
            for group in state.open
        )
        state = replace(state, open=changed, wanted=0, served=True)
        handed = (Hand(tuple(sorted(numbers))),)
    return state, (*actions, *dropped, *begun, *handed)


def _noted(state: Admission, event: Event) -> tuple[Admission, tuple[Action, ...]]:
    match event:
        case Wanted(count):
            return replace(state, wanted=state.wanted + count), ()
        case Finished(number):
            found = {group.number: group for group in state.open}
            if number not in found or found[number].done:
                raise ValueError(f"group {number} must be in flight, but it has ended before")
            found[number] = replace(found[number], done=True)
            return replace(state, open=tuple(found.values())), ()
        case Dropped(numbers):
            missing = {*numbers} - {group.number for group in state.open}
            if missing:
                raise ValueError(f"group {min(missing)} must be open to be dropped, but it is not")
            left = tuple(group for group in state.open if group.number not in numbers)
            return replace(state, open=left), ()
        case Trained():
            left = tuple(group for group in state.open if not group.handed)
            step = state.step + 1
            return replace(state, step=step, open=left, wanted=0, served=False), ()
        case Updated(again):
            state = replace(state, version=state.step)
            if not again:
                return state, ()
            drawn = [group.number for group in state.open if not group.done]
            renewed = tuple(
                group if group.done else replace(group, begun=state.version) for group in state.open
            )
            return replace(state, open=renewed), tuple(map(Begin, drawn))
    raise AssertionError(event)


def _without_stale(state: Admission) -> tuple[Admission, tuple[Action, ...]]:
    oldest = state.step - state.staleness
    stale = [group for group in state.open if not group.handed and group.begun < oldest]
    if not stale:
        return state, ()
    left = tuple(group for group in state.open if group not in stale)
    actions = tuple(Drop(group.number, STALE) for group in stale)
    return replace(state, open=left), actions

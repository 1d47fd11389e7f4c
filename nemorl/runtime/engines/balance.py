"""Which replica generates which prompts: pure bookkeeping, without processes and clocks."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one prompt, which stay together so that they share its prefill."""

    id: int
    samples: int
    tokens: int
    """The most that there is to do: the prompt's and the samples'."""


@dataclass(frozen=True, kw_only=True)
class Theft:
    """Groups that one replica has not begun, as far as is known, and that another would sooner come
    to.
    """

    victim: int
    thief: int
    groups: tuple[Group, ...]


@dataclass
class Share:
    """What one replica has to do: its groups in the order in which they were given, and which of
    them it is known to have begun.
    """

    groups: dict[int, Group] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    samples: int = 0
    tokens: int = 0

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        self.samples, self.tokens = self.samples + group.samples, self.tokens + group.tokens

    def remove(self, group: Group) -> None:
        del self.groups[group.id]
        self.samples, self.tokens = self.samples - group.samples, self.tokens - group.tokens


class Balance:
    """Groups that wait or are with a replica. Each goes to the replica that has the fewest tokens
    to do, among those that have room.

    A replica decodes `max_batch_size` samples at a time, and is given as many again to begin with
    as soon as it can. Once all are given, one that could decode more takes what another has not
    begun (`steal`). What a lost replica had goes to the front of the queue.

    >>> balance = Balance([Group(id=i, samples=1, tokens=10) for i in range(5)], replicas=[0, 1], max_batch_size=1)
    >>> {replica: [group.id for group in groups] for replica, groups in balance.assign().items()}
    {0: [0, 2], 1: [1, 3]}
    >>> [group.id for group in balance.lost(0)], balance.finished(1, 1)
    ([0, 2], True)
    >>> [group.id for group in balance.assign()[1]]
    [0]
    """

    def __init__(
        self, groups: Iterable[Group], *, replicas: Iterable[int], max_batch_size: int
    ) -> None:
        self.max_batch_size = max_batch_size
        self.queue = deque(groups)
        self.shares = {replica: Share() for replica in replicas}
        self.thefts: list[Theft] = []

    @property
    def unfinished(self) -> int:
        return len(self.queue) + sum(len(share.groups) for share in self.shares.values())

    def joined(self, replica: int) -> None:
        """A replica that can work from now on, with nothing to do yet."""
        self.shares[replica] = Share()

    def lost(self, replica: int) -> list[Group]:
        """A replica that works no more. What it had is done elsewhere, first of all."""
        groups = list(self.shares.pop(replica, Share()).groups.values())
        self.queue.extendleft(reversed(groups))
        self.thefts = [theft for theft in self.thefts if theft.victim != replica]
        return groups

    def finished(self, replica: int, group: int) -> bool:
        """Whether this was asked of this replica; it is done now."""
        share = self.shares.get(replica, Share())
        if group not in share.groups:
            return False
        share.remove(share.groups[group])
        return True

    def assign(self) -> dict[int, list[Group]]:
        """What to give now to the replicas that have room."""
        given: dict[int, list[Group]] = {}
        while self.queue and (
            room := [
                r for r, share in self.shares.items() if share.samples < 2 * self.max_batch_size
            ]
        ):
            replica, group = (
                min(room, key=lambda r: (self.shares[r].tokens, self.shares[r].samples, r)),
                self.queue.popleft(),
            )
            self.shares[replica].add(group)
            given.setdefault(replica, []).append(group)
        return given

    def steal(self) -> Theft | None:
        """What to take back from a replica for one that has places free, the last given first;
        `recalled` is to be told which it gave back.

        Only what leaves the taker with less to do than the other had, so that no group goes to and
        fro.
        """
        involved = {replica for theft in self.thefts for replica in (theft.victim, theft.thief)}
        shares = {
            replica: share for replica, share in self.shares.items() if replica not in involved
        }
        idle = [replica for replica, share in shares.items() if share.samples < self.max_batch_size]
        if self.queue or not idle:
            return None
        thief = min(idle, key=lambda r: (shares[r].tokens, r))
        for victim in sorted(shares.keys() - {thief}, key=lambda r: (-shares[r].tokens, r)):
            taken: list[Group] = []
            most, least, room = (
                shares[victim].tokens,
                shares[thief].tokens,
                2 * self.max_batch_size - shares[thief].samples,
            )
            for group in reversed(shares[victim].groups.values()):
                if (
                    group.id not in shares[victim].begun
                    and least + group.tokens < most
                    and room > 0
                ):
                    taken.append(group)
                    most, least, room = (
                        most - group.tokens,
                        least + group.tokens,
                        room - group.samples,
                    )
            if taken:
                self.thefts.append(Theft(victim=victim, thief=thief, groups=tuple(reversed(taken))))
                return self.thefts[-1]
        return None

    def recalled(self, theft: Theft, dropped: Collection[int]) -> list[Group]:
        """What to give the thief now: the groups that its victim has dropped, where the victim has
        not been lost meanwhile. The others have begun.
        """
        if theft not in self.thefts:
            return []
        self.thefts.remove(theft)
        share = self.shares[theft.victim]
        back = [group for group in theft.groups if group.id in dropped]
        for group in back:
            share.remove(group)
        share.begun.update(group.id for group in theft.groups if group.id not in dropped)
        if theft.thief not in self.shares:
            self.queue.extendleft(reversed(back))
            return []
        for group in back:
            self.shares[theft.thief].add(group)
        return back

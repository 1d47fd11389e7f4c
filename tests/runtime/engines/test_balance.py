"""The laws of the balance: whatever happens, no group is lost or done twice, and no replica is idle
while there is something that it could do.
"""

import hypothesis.strategies as st
from hypothesis import assume
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from nemorl.runtime.engines.balance import Balance, Group, Theft


def groups(*tokens: int, samples: int = 1) -> list[Group]:
    return [Group(id=i, samples=samples, tokens=t) for i, t in enumerate(tokens)]


def ids(given: dict[int, list[Group]]) -> dict[int, list[int]]:
    return {replica: [group.id for group in part] for replica, part in given.items()}


class Machine(RuleBasedStateMachine):
    """Replicas that begin, finish, give back, die and return at any time, told of by a model that
    knows the truth.
    """

    thefts: Bundle[Theft] = Bundle("thefts")

    def __init__(self) -> None:
        super().__init__()
        self.balance = Balance([], replicas=[0, 1], max_batch_size=4)
        self.all: dict[int, Group] = {}
        self.given: dict[int, dict[int, bool]] = {
            0: {},
            1: {},
        }  # replica -> the groups that it was really given -> whether it has begun it
        self.done: list[int] = []
        self.lives: dict[int, int] = {0: 0, 1: 0}

    @rule(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=8))
    def more_work(self, sizes: list[tuple[int, int]]) -> None:
        for samples, tokens in sizes:
            group = Group(id=len(self.all), samples=samples, tokens=tokens)
            self.all[group.id] = group
            self.balance.queue.append(group)

    @rule()
    def assign(self) -> None:
        for replica, part in self.balance.assign().items():
            self.give(replica, part)
        if self.balance.queue:
            assert all(self.samples(replica) >= 8 for replica in self.given)

    def give(self, replica: int, part: list[Group]) -> None:
        for group in part:
            assert group.id not in self.done
            assert not any(group.id in share for share in self.given.values())
            self.given[replica][group.id] = False

    def samples(self, replica: int) -> int:
        return sum(self.all[i].samples for i in self.given[replica])

    @rule(data=st.data())
    def begin_or_finish(self, data: st.DataObject) -> None:
        at_work = [(replica, group) for replica, share in self.given.items() for group in share]
        assume(at_work)
        replica, group = data.draw(st.sampled_from(at_work))
        if not self.given[replica][group]:
            self.given[replica][group] = True
            return
        del self.given[replica][group]
        assert self.balance.finished(replica, group)
        self.done.append(group)
        assert not self.balance.finished(replica, group)
        assert not any(self.balance.finished(other, group) for other in self.given)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        assume(self.given)
        replica = data.draw(st.sampled_from(sorted(self.given)))
        back = self.balance.lost(replica)
        assert [group.id for group in back] == list(self.given.pop(replica))
        assert list(self.balance.queue)[: len(back)] == back
        assert self.balance.lost(replica) == []

    @rule(replica=st.integers(0, 3))
    def join(self, replica: int) -> None:
        assume(replica not in self.given)
        self.balance.joined(replica)
        self.given[replica] = {}
        self.lives[replica] = self.lives.get(replica, 0) + 1

    @rule(target=thefts)
    def steal(self) -> tuple[Theft, int] | None:
        theft = self.balance.steal()
        assume(theft is not None)
        assert theft.victim != theft.thief
        assert self.samples(theft.thief) < 4
        assert theft.groups
        assert {group.id for group in theft.groups} <= self.given[theft.victim].keys()
        return theft, self.lives[theft.victim]

    @rule(stolen=consumes(thefts))
    def answer(self, stolen: tuple[Theft, int]) -> None:
        """The victim drops what it has not begun; the answer of one that has died since does not
        count.
        """
        theft, life = stolen
        alive = theft.victim in self.given and self.lives[theft.victim] == life
        share = self.given[theft.victim] if alive else {}
        dropped = [group.id for group in theft.groups if share.get(group.id) is False]
        for group in dropped:
            del share[group]
        given = self.balance.recalled(theft, dropped)
        if theft.thief in self.given:
            self.give(theft.thief, given)
            assert [group.id for group in given] == dropped
        else:
            assert given == []

    @precondition(lambda self: len(self.given) > 1)
    @rule()
    def steal_until_even(self) -> None:
        """When nothing waits, nothing is under way and nothing has begun: no replica has places
        free that another's last group would fill sooner.
        """
        assume(
            not self.balance.queue
            and not self.balance.thefts
            and not any(any(share.values()) for share in self.given.values())
        )
        before = self.spread()
        while theft := self.balance.steal():
            for group in theft.groups:
                del self.given[theft.victim][group.id]
            self.give(
                theft.thief, self.balance.recalled(theft, [group.id for group in theft.groups])
            )
            assert self.spread() < before
            before = self.spread()
        assert all(self.given.values()) or not any(len(share) > 1 for share in self.given.values())

    def spread(self) -> int:
        return sum(self.tokens(replica) ** 2 for replica in self.given)

    def tokens(self, replica: int) -> int:
        return sum(self.all[i].tokens for i in self.given[replica])

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        everywhere = (
            [group.id for group in self.balance.queue]
            + [i for share in self.given.values() for i in share]
            + self.done
        )
        assert sorted(everywhere) == sorted(self.all)
        assert self.balance.unfinished == len(self.all) - len(self.done)

    @invariant()
    def it_knows_what_each_has(self) -> None:
        assert {r: list(share.groups) for r, share in self.balance.shares.items()} == {
            r: list(share) for r, share in self.given.items()
        }
        assert {r: share.tokens for r, share in self.balance.shares.items()} == {
            r: self.tokens(r) for r in self.given
        }
        assert {r: share.samples for r, share in self.balance.shares.items()} == {
            r: self.samples(r) for r in self.given
        }


TestLaws = Machine.TestCase


def test_groups_go_where_the_fewest_tokens_are():
    balance = Balance(groups(50, 10, 10, 10, 10, 5), replicas=[0, 1], max_batch_size=8)
    assert ids(balance.assign()) == {0: [0], 1: [1, 2, 3, 4, 5]}


def test_a_replica_is_given_one_batch_ahead():
    """What it decodes and as much again, counted in samples; a group is not divided."""
    balance = Balance(groups(*[10] * 9, samples=3), replicas=[0], max_batch_size=4)
    assert ids(balance.assign()) == {0: [0, 1, 2]}
    assert balance.assign() == {}
    assert balance.finished(0, 1)
    assert ids(balance.assign()) == {0: [3]}


def test_a_group_larger_than_the_batch_goes_to_one_replica():
    balance = Balance(groups(10, samples=100), replicas=[0, 1], max_batch_size=4)
    assert ids(balance.assign()) == {0: [0]}


def stolen(*tokens: int, max_batch_size: int = 2) -> tuple[Balance, Theft]:
    """Everything with replica 0; replica 1 comes, and is to take something."""
    balance = Balance(groups(*tokens), replicas=[0], max_batch_size=max_batch_size)
    balance.assign()
    balance.joined(1)
    theft = balance.steal()
    assert theft is not None
    return balance, theft


def test_the_idle_take_the_last_of_what_others_have_not_begun():
    balance, theft = stolen(10, 10, 10, 10)
    assert (theft.victim, theft.thief, [group.id for group in theft.groups]) == (0, 1, [2, 3])
    assert balance.steal() is None  # until this one is answered
    assert [group.id for group in balance.recalled(theft, [3])] == [3]
    again = balance.steal()  # group 2 has begun
    assert again is not None
    assert [group.id for group in again.groups] == [1]


def test_what_ends_before_it_is_given_back_has_ended():
    balance, theft = stolen(10, 10, 10, 10)
    assert balance.finished(0, 3)
    assert [group.id for group in balance.recalled(theft, [2])] == [2]
    assert not balance.finished(1, 3)
    assert balance.unfinished == 3


def test_an_answer_of_a_replica_that_was_lost_meanwhile_does_not_count():
    balance, theft = stolen(10, 10, 10, 10)
    balance.lost(0)
    balance.joined(0)
    assert balance.recalled(theft, [2, 3]) == []
    assert [group.id for group in balance.queue] == [0, 1, 2, 3]


def test_what_was_taken_for_a_replica_that_is_lost_meanwhile_waits():
    balance, theft = stolen(10, 10, 10, 10)
    balance.lost(1)
    assert balance.recalled(theft, [2, 3]) == []
    assert [group.id for group in balance.queue] == [2, 3]


def test_only_a_replica_with_places_free_takes_and_only_one_batch_ahead():
    balance = Balance(groups(*[1] * 4), replicas=[1], max_batch_size=2)
    balance.assign()
    balance.joined(0)
    balance.queue.extend(
        Group(id=i, samples=samples, tokens=tokens)
        for i, samples, tokens in ((4, 1, 999), (5, 1, 9), (6, 1, 9), (7, 6, 9))
    )
    balance.assign()
    balance.finished(1, 0)
    assert balance.steal() is None  # replica 1 has less to do, but its places are taken
    balance.finished(1, 1)
    balance.finished(1, 2)
    theft = balance.steal()
    assert theft is not None
    assert [group.id for group in theft.groups] == [7]


def test_nothing_is_taken_that_would_only_change_places():
    balance = Balance(groups(10), replicas=[0], max_batch_size=2)
    balance.assign()
    balance.joined(1)
    assert balance.steal() is None


def test_nothing_is_taken_while_anything_waits():
    balance = Balance(groups(*[10] * 9), replicas=[0], max_batch_size=2)
    balance.assign()
    balance.joined(1)
    assert balance.steal() is None


def test_what_a_lost_replica_had_comes_first_and_in_its_order():
    balance = Balance(groups(*[10] * 6), replicas=[0, 1], max_batch_size=1)
    balance.assign()
    balance.lost(0)
    assert [group.id for group in balance.queue] == [0, 2, 4, 5]

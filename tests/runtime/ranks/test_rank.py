"""What a rank does with a call, without a process for it."""

import pytest
import torch

from nemorl.parallel.config import BackendConfig
from nemorl.runtime.ranks import rank as module
from nemorl.runtime.ranks.rank import Rank
from tests.runtime.ranks.backends import Summing

SIZES = {"a": 10, "b": 60, "c": 300, "d": 1, "e": 40, "empty": 0}
"""Elements of float32; a bucket holds 256 bytes."""


def weights(seen: list[str]):
    for index, (name, size) in enumerate(SIZES.items()):
        seen.append(name)
        yield name, torch.full((size,), float(index))


class Loose(Summing):
    """By itself: no process group."""

    def setup(self, config):
        self.rank, self.seen = 0, []

    def weights(self):
        return weights(self.seen)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 256)

    def maker(rank: int = 0) -> Rank:
        host = Rank(Loose, rank)
        host.do("setup", (BackendConfig(),), {})
        return host

    return maker


def test_buckets_hold_everything_in_order_and_are_cut_alike_everywhere(make):
    ranks, buckets, seen = [make(), make(1)], [], []
    for rank in ranks:
        rank.do("export_open", (), {})
    while bucket := ranks[0].do("export_next", (), {}):
        buckets.append([name for name, _ in bucket])
        assert ranks[1].do("export_next", (), {}) is None
        seen.append([len(rank._backends[""].seen) for rank in ranks])
    assert buckets == [["a", "b"], ["c"], ["d", "e", "empty"]]
    assert seen == [[2, 2], [3, 3], [6, 6]], "no rank gathers ahead"


def test_weights_of_two_backends_may_be_read_side_by_side(make):
    host = make()
    host.do("setup", (BackendConfig(),), {"backend": "critic"})
    for name in ("", "critic"):
        host.do("export_open", (), {"backend": name})
    found = {"": [], "critic": []}
    for _ in range(3):
        for name, names in found.items():
            names += [each for each, _ in host.do("export_next", (), {"backend": name})]
    assert found == {"": list(SIZES), "critic": list(SIZES)}

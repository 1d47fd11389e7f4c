"""megatron-core: where it can't be imported, and its division of the ranks, of which a process has
one at a time.
"""

import runpy
import sys

import pytest
import torch
import torch.distributed as dist

from nemorl.parallel.plan import ParallelPlan
from tests.ranks import run_ranks

PLANS = (
    ParallelPlan(dp_shard=1, tp=2),
    ParallelPlan(dp_shard=1, pp=2),
    ParallelPlan(dp_shard=2),
    ParallelPlan(dp_shard=1, tp=2),
    ParallelPlan(dp_shard=1, cp=2),
)


def places() -> list[tuple[int, float]]:
    from nemorl.parallel.megatron.core import join

    found = []
    for plan in PLANS:
        world = join(plan, "cpu")
        rank, value = dist.get_rank(), torch.ones(1)
        places = world.tp_rank, world.pp_rank, world.data_rank, world.cp_rank
        assert places == tuple(rank * (d > 1) for d in (plan.tp, plan.pp, plan.data_ranks, plan.cp))
        groups = (world.tp_group, world.pp_group, world.data_group, world.cp_group)
        (group,) = [each for each in groups if each is not None]
        dist.all_reduce(value, group=group)
        # Before `join` ended them, each division left two dozen groups behind, with their threads.
        found.append((len(dist.distributed_c10d._world.pg_map), float(value)))
        assert join(plan, "cpu") == world
    return found


@pytest.mark.slow
def test_a_new_division_ends_the_one_before():
    for found in run_ranks(2, places, fresh=True):
        counts, sums = zip(*found, strict=True)
        assert set(sums) == {2.0}
        assert max(counts) - min(counts) <= 4


def test_what_can_not_be_imported_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    message = r"needs megatron-core, which can't be imported .* pip install 'nemorl\[megatron\]'"
    with pytest.raises(ValueError, match=message):
        runpy.run_module("nemorl.parallel.megatron.core")

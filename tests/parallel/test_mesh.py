"""Ranks along the axes of the mesh, and how long their collectives may take."""

import gc
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from nemorl.parallel.dtensor.mesh import World
from nemorl.parallel.plan import ParallelPlan
from tests.ranks import run_ranks


def late() -> list[str]:
    """What becomes of rank 0's collectives while rank 1 takes part in none."""
    world, found = World.of(ParallelPlan(dp_shard=2), "cpu", timeout_s=1), []
    if world.rank == 1:
        time.sleep(6)
        return []
    for group in (world.data_group, world.fsdp_mesh.get_group(), world.control_group):
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        found.append(str(caught.value))
    return found


def test_no_collective_takes_longer_than_it_may():
    found, _ = run_ranks(2, late, fresh=True)
    assert "1000ms" in found[0] and "1000ms" in found[2]
    assert "timeout" in found[1] or "1000ms" in found[1], "it may share the first one's group"


def threads_of_worlds(count: int) -> list[int]:
    """Threads of this process after each world that it joined and left again."""
    found = []
    for _ in range(count):
        world = World.of(ParallelPlan(dp_shard=2), "cpu")
        dist.all_reduce(torch.ones(1), group=world.control_group)
        world.leave()
        del world
        gc.collect()
        found.append(psutil.Process().num_threads())
    return found


def test_a_world_that_is_left_keeps_no_threads():
    for found in run_ranks(2, threads_of_worlds, 4):
        assert found[1] == found[3]

"""What the ranks of a world tell each other, and how long that may take."""

import os
from operator import add
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from nemorl.parallel.dtensor import mesh
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.world import World
from tests.ranks import run_ranks


def joined() -> World:
    return mesh.join(ParallelPlan(dp_shard=dist.get_world_size()), "cpu", timeout_s=30)


def merged() -> tuple[Any, Any]:
    world = joined()
    everywhere = world.merge_objects([world.rank], add)
    return everywhere, world.merge_objects([world.rank], add, everywhere=False)


@pytest.mark.parametrize("size", [2, 3])
def test_values_are_merged_in_the_order_of_ranks(size: int):
    found = run_ranks(size, merged)
    assert [everywhere for everywhere, _ in found] == [list(range(size))] * size
    assert found[0][1] == list(range(size))


def failing(kind: type[Exception], shared: type[Exception]) -> str:
    world = joined()
    with pytest.raises(Exception) as caught, world.share_errors():
        if world.rank in (1, world.size - 1):
            raise kind(f"file of {world.rank}")
    assert type(caught.value) is shared
    assert (caught.value.__cause__ is not None) is (world.rank > 0)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shared"),
    [(FileNotFoundError, FileNotFoundError), (torch.OutOfMemoryError, RuntimeError)],
)
def test_the_first_ranks_error_is_raised_on_every_rank(kind, shared):
    found = run_ranks(3, failing, kind, shared)
    assert len(set(found)) == 1 and "file of 1" in found[0] and "rank 1 of 3" in found[0]


def late() -> list[str]:
    world, found = mesh.join(ParallelPlan(dp_shard=2), "cpu", timeout_s=1), []
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["rank 0 is done"])
        return []
    for group in (world.data_group, world.fsdp_mesh.get_group(), world.control_group):
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        found.append(str(caught.value))
    store.set("rank 0 is done", "")
    return found


@pytest.mark.slow
def test_no_collective_takes_longer_than_it_may():
    found, _ = run_ranks(2, late, fresh=True)
    assert "1000ms" in found[0] and "1000ms" in found[2]
    assert "timeout" in found[1] or "1000ms" in found[1], "it may share the first one's group"


def listens_to() -> set[str]:
    assert not dist.is_initialized()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    mesh.join(ParallelPlan(dp_shard=2), "cpu")
    assert dist.get_world_size() == 2 and os.environ["GLOO_SOCKET_IFNAME"]
    found = psutil.Process().net_connections()
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_ranks_of_one_machine_listen_to_its_loopback_alone():
    assert run_ranks(2, listens_to, process_group=False) == [{"127.0.0.1"}] * 2

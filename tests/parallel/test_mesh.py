"""Ranks along the axes of the mesh, and how long their collectives may take."""

import os

import psutil
import pytest
import torch
import torch.distributed as dist

from nemorl.parallel.dtensor import mesh
from nemorl.parallel.plan import ParallelPlan
from tests.ranks import run_ranks


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

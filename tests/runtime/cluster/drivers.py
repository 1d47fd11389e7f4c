"""Programs that are killed, or whose cluster is: run as `python -m tests.runtime.cluster.drivers
NAME ...`; each prints lines of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import ray
from ray._private import auto_init_hook, worker

from nemorl.runtime.cluster.placement import (
    DRIVER,
    Bundle,
    ClusterLost,
    RayClusterError,
    RayVirtualCluster,
)
from nemorl.runtime.cluster.workers import RayWorkerGroup, WorkerDied, wait
from tests.runtime.cluster.conftest import TARGET
from tests.runtime.cluster.processes import soon_gone


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def below() -> dict[int, str]:
    """The processes that this one has brought into the world, by their ids."""
    return {
        process.pid: " ".join(process.cmdline())
        for process in psutil.Process().children(recursive=True)
    }


def busy(address: str = "") -> None:
    """Two workers with children, one of them at work, and a large array on its way; then this
    process waits to be killed.
    """
    cluster = RayVirtualCluster({"a": [Bundle()] * 2}, num_cpus=2, address=address or None)
    group = RayWorkerGroup(cluster.placement("a"), TARGET)
    children = [pid for pair in group.run_all("spawn") for pid in pair]
    result = group.call(1, "add", np.ones(5_000_000)).result()
    group.call(0, "sleep", 600)
    tell(pids=[group.info(0).pid, group.info(1).pid, *children, *below()], size=result.size)
    time.sleep(600)


def lost(victim: str) -> None:
    """One of the cluster's own processes is killed while a call is in flight."""
    cluster = RayVirtualCluster({"a": [Bundle()]}, num_cpus=2)
    group = RayWorkerGroup(cluster.placement("a"), TARGET, max_concurrency=2)
    pending, pids = group.call(0, "sleep", 600), list(below())
    next(process for process in psutil.Process().children() if process.name() == victim).kill()
    start, seen = time.monotonic(), {}
    attempts: dict[str, Callable[[], Any]] = {
        "result": pending.result,
        "wait": lambda: wait([pending], 5),
        "call": lambda: group.call(0, "add").result(),
        "restart": lambda: group.restart(0),
        "nodes": lambda: cluster.nodes,
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except ClusterLost as error:
            seen[name] = str(error)
        if name == "result":
            noticed = time.monotonic() - start
    time.sleep(
        max(0.0, 14 - (time.monotonic() - start))
    )  # a checkpoint is written; Ray itself would have ended this process by now
    end = time.monotonic()
    cluster.shutdown()
    tell(seen=seen, noticed=noticed, took=time.monotonic() - end, pids=pids)


def ways() -> list[Any]:
    """What Ray must be left with."""
    return [worker.listen_error_messages, worker.connect, auto_init_hook.enable_auto_connect]


def found() -> None:
    """This process is connected to Ray before, and goes on to use it."""
    before = ways()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    value = ray.put(7)
    with RayVirtualCluster({"a": [Bundle()]}) as cluster:
        group = RayWorkerGroup(cluster.placement("a"), TARGET)
        sum, pid = group.run_rank_zero("add", 1, 2), group.info(0).pid
    tell(sum=sum, gone=soon_gone(pid), value=ray.get(value), as_before=ways() == before)
    ray.shutdown()


def nowhere() -> None:
    """RAY_ADDRESS is that of no cluster."""
    start = time.monotonic()
    try:
        RayVirtualCluster({"a": [Bundle()]})
    except RayClusterError as error:
        tell(error=str(error), took=time.monotonic() - start)


def set_aside() -> None:
    """A GPU that a trainer outside of Ray computes on, beside those of workers. (Ray counts GPUs;
    there need not be any.)
    """
    bundles = {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)], "generation": [Bundle(gpus=1)] * 2}
    before = ways()
    with RayVirtualCluster(bundles, num_cpus=2, num_gpus=3) as cluster:
        group = RayWorkerGroup(cluster.placement("generation"), TARGET)
        devices = [
            found["CUDA_VISIBLE_DEVICES"]
            for found in group.run_all("environment", "CUDA_VISIBLE_DEVICES")
        ]
    tell(devices=devices, as_before=ways() == before)


def two_nodes() -> None:
    """Trainer and generators on different nodes, and a group across both; then one of the nodes
    goes.
    """
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    second = nodes.add_node(num_cpus=4)
    here, there = nodes.head_node.node_id, second.node_id
    bundles = {
        "trainer": [Bundle(node=here)],
        "generation": [Bundle(node=there)] * 2,
        "both": [Bundle(node=here), Bundle(node=there)],
    }
    with (
        RayVirtualCluster(bundles, address=nodes.address) as cluster,
        RayVirtualCluster({"free": [Bundle()] * 2}, strategy="SPREAD") as spread,
    ):
        free = RayWorkerGroup(spread.placement("free"), TARGET)
        movable = next(rank for rank in range(2) if free.info(rank).node == there)
        trainer = RayWorkerGroup(cluster.placement("trainer"), TARGET)
        generation = RayWorkerGroup(cluster.placement("generation"), TARGET)
        both = RayWorkerGroup(cluster.placement("both"), TARGET)
        found = {
            "nodes": [
                [group.info(rank).node for rank in range(len(group))]
                for group in (trainer, generation, both)
            ],
            "local_ranks": both.run_all("environment", "LOCAL_RANK"),
            "sums": both.run_all("all_reduce", timeout_s=60),
            "size": generation.call(0, "add", np.ones(2_000_000)).result().size,
        }
        children = generation.call(1, "spawn").result()
        generation.kill(1)
        pending = generation.call(0, "sleep", 600)
        nodes.remove_node(second, allow_graceful=False)
        try:
            pending.result(60)
        except WorkerDied as error:
            found["died"], found["gone"] = str(error), soon_gone(generation.info(0).pid)
        for _ in range(20):  # Ray refuses until it knows that the node is gone
            with suppress(WorkerDied):
                free.restart(movable)
                break
            time.sleep(1)
        found["moved"] = [
            free.info(movable).node,
            free.call(movable, "environment", "LOCAL_RANK").result()["LOCAL_RANK"],
            movable,
        ]
        free.call(movable, "write").result()
        try:
            free.call(movable, "sleep_or_die", None).result()
        except WorkerDied as error:
            found["of_moved"] = str(error)
        tell(
            here=here,
            there=there,
            **found,
            driver=cluster.driver_node,
            children=[*children, generation.info(0).pid],
            trainer=trainer.run_all("add", 1),
        )
    nodes.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""Ranks on four Ray nodes of this machine: `python -m tests.runtime.ranks.four_nodes` prints a line
of JSON. Each node declares eight GPUs, which are only numbers that Ray counts.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
from nemorl.runtime.ranks.actors import rank_bundles
from nemorl.runtime.workers.cluster import Bundle, Placement, RayVirtualCluster
from nemorl.runtime.workers.worker import RayWorkerGroup
from tests.runtime.workers.conftest import TARGET
from tests.runtime.workers.nodes import cluster_of


def settings(tp: int, *, engines_of: int = 0, **runtime: Any) -> BaseConfig:
    """engines_of: the GPUs of each engine that shares them with ranks."""
    engines = {"backend": "vllm", "tensor_parallel_size": engines_of} if engines_of else {}
    return BaseConfig(
        parallel=ParallelPlan(tp=tp),
        runtime=RuntimeConfig(**runtime),
        generation=GenerationConfig(**engines),
    )


def letters(nodes: Sequence[str], placement: Placement) -> str:
    """The nodes of ranks as letters; the driver's is A."""
    found = [
        "ABCD"[nodes.index(node)]
        for node, bundle in zip(placement.nodes, placement.bundles, strict=True)
        for _ in range(bundle.workers)
    ]
    return "".join(found)


def placed(nodes: Sequence[str], bundles: list[Bundle]) -> str:
    with RayVirtualCluster({"rank": bundles}) as cluster:
        return letters(nodes, cluster.placement("rank"))


def placements(nodes: Sequence[str]) -> dict[str, Any]:
    """Nodes of 24 and 32 ranks, one by one and by groups."""
    alone = settings(8, tp_across_nodes=True)
    found: dict[str, Any] = {"alone": {}, "grouped": {}}
    for size in (24, 32):
        found["alone"][size] = placed(nodes, rank_bundles(alone, size))
        found["grouped"][size] = placed(nodes, rank_bundles(settings(8), size))
    taken = {"taken": [Bundle(cpus=0, gpus=gpus, node=nodes[i]) for i, gpus in ((0, 3), (1, 2))]}
    with RayVirtualCluster(taken):
        found["partly"] = placed(nodes, rank_bundles(settings(4), 24))
        shared = settings(2, engines_of=4)
        found["shared"] = placed(nodes, rank_bundles(shared, 24, shared.generation))
        found["own"] = rank_bundles(shared, 24)[0].workers
    try:
        rank_bundles(settings(16), 16)
    except ValueError as error:
        found["error"] = str(error)
    return found


def ranks(nodes: Sequence[str]) -> list[dict[str, str]]:
    """What workers know of themselves whose bundles were asked for in another order."""
    asked = [Bundle(gpus=1, node=nodes[i]) for i in (2, 0)]
    pair = Bundle(gpus=1, node=nodes[2], workers=2)
    with RayVirtualCluster({"rank": [*asked, pair]}) as cluster:
        group = RayWorkerGroup(cluster.placement("rank"), TARGET)
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
        found = group.run_all("environment", *names)
        for rank, each in enumerate(found):
            info = group.info(rank)
            each["node"] = "ABCD"[nodes.index(info.node)]
            assert (each.pop("CUDA_VISIBLE_DEVICES"),) == info.gpus
            each["gpus"] = [*info.gpus]
        group.shutdown()
    return found


def main() -> None:
    size = {"num_cpus": 8, "num_gpus": 8}
    cluster, (head, *others) = cluster_of(size, size, size, size)
    nodes = [head, *sorted(others)]  # of one address, so sorted by their names
    connected = {"connected": [Bundle(cpus=0, resources={"node:__internal_head__": 0.001})]}
    os.environ["RAY_ADDRESS"] = cluster.address
    with RayVirtualCluster(connected):
        print(json.dumps({**placements(nodes), "ranks": ranks(nodes)}))
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""What nodes of a cluster say of their GPUs, which this process may have none of."""

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemorl.runtime.cluster.connection import connect, release


def smallest_gpu(timeout_s: float = 60) -> int | None:
    """Return the memory in bytes of the smallest GPU, of one on each node that has a free one; None
    where torch sees none of them.
    """
    connect()
    try:
        asked = [
            ray.remote(_memory)
            .options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("GPU", 0) >= 1
        ]
        done, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        for one in late:  # others have all GPUs of the node
            ray.cancel(one)
        return min(filter(None, ray.get(done)), default=None)
    finally:
        release()


def _memory() -> int:
    """Return the memory in bytes of this process's GPU; 0 where torch sees none."""
    available = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).total_memory if available else 0

"""What nodes of a cluster say of their GPUs, which this process may have none of."""

from collections.abc import Sequence
from contextlib import suppress

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster, ResourcesError


def smallest_of_cluster(bundles: Sequence[Bundle], timeout_s: float = 60) -> int | None:
    """Return the memory in bytes of the smallest GPU, of one on each node that bundles with GPUs
    take; None where there is no room for them, or the memory of one is not known.
    """
    with (
        suppress(ResourcesError, RayError),  # such as a node without nemorl
        RayVirtualCluster({"asked": bundles}, timeout_s=timeout_s) as cluster,
    ):
        placement = cluster.placement("asked")
        first = dict(zip(reversed(placement.nodes), reversed(placement.indices), strict=True))
        asked = [
            ray.remote(_memory)
            .options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement.group, placement_group_bundle_index=index
                ),
            )
            .remote()
            for index in first.values()
        ]
        return min(ray.get(asked, timeout=timeout_s)) or None
    return None


def _memory() -> int:
    """Return the memory in bytes of this process's GPU; 0 where torch sees none."""
    available = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).total_memory if available else 0

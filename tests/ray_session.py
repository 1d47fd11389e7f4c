"""One local Ray cluster per test process, from the first test of the group "ray" to its last."""

import atexit
import functools
import sys
from contextlib import ExitStack

import pytest

NUM_CPUS = NUM_GPUS = 8
"""Logical ones: what is tested doesn't need the time of as many CPUs, and no GPU at all. (Replicas
that tests share may hold CPUs, but no GPUs.)
"""
ENDS = ExitStack()
"""Ends what tests share on the cluster, the last first; then the cluster."""


@functools.cache
def ray_cpus() -> int:
    """Start the cluster of this process; how many CPUs it thinks it has."""
    from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster

    session = {"session": [Bundle(cpus=0, resources={"node:__internal_head__": 0.001})]}
    ENDS.callback(RayVirtualCluster(session, num_cpus=NUM_CPUS, num_gpus=NUM_GPUS).shutdown)
    return NUM_CPUS


def end_ray() -> None:
    """An idle cluster takes an eighth of a core."""
    ray_cpus.cache_clear()
    ENDS.close()
    if ray := sys.modules.get("ray"):
        ray.shutdown()  # of those that keep their connection until the process ends, too


atexit.register(end_ray)


def is_of_ray(item: pytest.Item | None) -> bool:
    group = item and item.get_closest_marker("xdist_group")
    return bool(group) and "ray" in group.args

"""One local Ray cluster per test process, started when a test first needs it."""

import atexit
import functools

from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster

NUM_CPUS = NUM_GPUS = 8
"""Logical ones: what is tested doesn't need the time of as many CPUs, and no GPU at all. (Replicas
that tests share may hold CPUs, but no GPUs.)
"""


@functools.cache
def ray_cpus() -> int:
    """Start the cluster, if need be, that every RayVirtualCluster of this process then shares; how
    many CPUs it thinks it has.
    """
    session = {"session": [Bundle(cpus=0, resources={"node:__internal_head__": 0.001})]}
    atexit.register(RayVirtualCluster(session, num_cpus=NUM_CPUS, num_gpus=NUM_GPUS).shutdown)
    return NUM_CPUS

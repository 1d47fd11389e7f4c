"""Ray: the connection of this process, bundles of CPUs and GPUs, and groups of workers in them.

Others use `placement.RayVirtualCluster`, `placement.Bundle` and `worker_group.RayWorkerGroup`.
"""

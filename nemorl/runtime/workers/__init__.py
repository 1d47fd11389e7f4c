"""Workers that Ray places: the connection of this process, bundles of CPUs and GPUs, and groups.

Others use `cluster.RayVirtualCluster`, `cluster.Bundle` and `group.RayWorkerGroup`.
"""

"""Workers that Ray places: the connection of this process, bundles of CPUs and GPUs, and the one
worker.

Others use `cluster.RayVirtualCluster`, `cluster.Bundle`, `worker.Worker` and
`worker.RayWorkerGroup`.
"""

"""Ray clusters of several nodes on this machine."""

from typing import Any


def cluster_of(head: dict[str, Any], *others: dict[str, Any]) -> tuple[Any, list[str]]:
    """A cluster, and the ids of its nodes. Ray gives each node 30 s to start, which a busy machine
    may not keep: then all start anew.
    """
    from ray.cluster_utils import Cluster

    for tries_left in (2, 1, 0):
        cluster = Cluster()
        try:
            nodes = [cluster.add_node(**{"include_dashboard": False, **head})]
            nodes += [cluster.add_node(**other) for other in others]
            return cluster, [node.node_id for node in nodes]
        except Exception as error:
            if not tries_left or "timed out during startup" not in str(error):
                raise
            cluster.shutdown()
    raise AssertionError

"""Ray clusters of several nodes on this machine, and the processes that start them."""

import json
import sys
from typing import Any

from tests.forked import succeeded


def printed(module: str, *args: object, timeout: float) -> Any:
    """Run a module in a process of its own, and return the JSON of the last line that it prints."""
    ran = succeeded(sys.executable, "-m", module, *map(str, args), timeout=timeout)
    return json.loads(ran.stdout.splitlines()[-1])


def cluster_of(head: dict[str, Any], *others: dict[str, Any]) -> tuple[Any, list[str]]:
    """A cluster, and the ids of its nodes."""
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

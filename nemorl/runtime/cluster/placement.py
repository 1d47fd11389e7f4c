"""Named bundles of CPUs and GPUs on a Ray cluster, from one process to many nodes."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.checks import at_least, require
from nemorl.runtime.cluster.connection import check, connect, release

DRIVER = "driver"
"""Stands for the node of this process as the node of a bundle."""
TOO_LITTLE = "the cluster has too little"


class ResourcesError(ValueError):
    """The cluster has too little for what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one worker needs, on any node or on `node`, the id of a Ray node or DRIVER.

    >>> Bundle(cpus=2, gpus=1, workers=4).amounts
    {'CPU': 8, 'GPU': 4}
    """

    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None
    workers: int = 1
    """Workers that each need this, together on one node."""

    def __post_init__(self) -> None:
        named = {f"resources__{name}": amount for name, amount in self.resources.items()}
        at_least(0, cpus=self.cpus, gpus=self.gpus, **named)
        at_least(1, workers=self.workers)
        require(bool(self.amounts), "cpus", "must be positive where a bundle asks for nothing else",
                self.cpus, "use 1")  # fmt: skip

    @property
    def amounts(self) -> dict[str, float]:
        """Return the amounts of all workers together by Ray's names, without zeros."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: self.workers * amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bundles of one name are, sorted by node: this process's first, then by address."""

    bundles: tuple[Bundle, ...]
    group: PlacementGroup
    indices: tuple[int, ...]
    nodes: tuple[str, ...]


class RayVirtualCluster:
    """Named groups of bundles, reserved together or not at all.

    On the cluster that this process is connected to, the one at `address` (or RAY_ADDRESS; "auto":
    the one that runs on this machine), or else a local one of `num_cpus` and `num_gpus` (None: the
    machine's), which ends with its last user.

    Raises ResourcesError where the bundles do not fit within `timeout_s`, and RayClusterError where
    Ray cannot be reached or started.
    """

    def __init__(
        self,
        bundles: Mapping[str, Sequence[Bundle]],
        *,
        address: str | None = None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        strategy: str = "PACK",
        timeout_s: float = 60,
    ) -> None:
        require(any(bundles.values()), "bundles", "must name one bundle at least", dict(bundles),
                "add a Bundle()")  # fmt: skip
        connect(address, num_cpus=num_cpus, num_gpus=num_gpus)
        self._release = ExitStack()
        self._release.callback(release)
        try:
            self.driver_node: str = ray.get_runtime_context().get_node_id()
            self._bundles = {
                name: tuple(
                    replace(one, node=self.driver_node) if one.node == DRIVER else one
                    for one in of_name
                )
                for name, of_name in bundles.items()
            }
            self._group = self._reserve(strategy, timeout_s)
        except BaseException:
            self._release.close()
            raise

    def _reserve(self, strategy: str, timeout_s: float) -> PlacementGroup:
        flat = [bundle for of_name in self._bundles.values() for bundle in of_name]
        if not could_fit(flat):
            raise ResourcesError(table(self._bundles, TOO_LITTLE))
        group = placement_group(
            [bundle.amounts for bundle in flat],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": b.node} if b.node else {} for b in flat],
        )
        self._release.callback(_remove, group)
        deadline = time.monotonic() + timeout_s
        while not group.wait(1.0):
            check()
            if time.monotonic() >= deadline:
                reason = f"no room was found within {timeout_s:g} s"
                raise ResourcesError(table(self._bundles, reason))
        return group

    def placement(self, name: str) -> Placement:
        """Return where the bundles of this name are."""
        require(name in self._bundles, "name", f"must be one of {', '.join(self._bundles)}", name,
                "use a name that the cluster was made with")  # fmt: skip
        names = [one for one, of_name in self._bundles.items() for _ in of_name]
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def place(index: int) -> tuple[bool, list[str | int], str]:
            node = nodes[index]
            return node != self.driver_node, natural(addresses[node]), node

        own = [index for index, one in enumerate(names) if one == name]
        indices = sorted(own, key=place)
        return Placement(
            bundles=tuple(self._bundles[name][own.index(index)] for index in indices),
            group=self._group,
            indices=tuple(indices),
            nodes=tuple(nodes[index] for index in indices),
        )

    def check(self) -> None:
        """Raise ClusterLost if the cluster's head is gone."""
        check()

    def shutdown(self) -> None:
        """Return the bundles, and end Ray if it was started here. May be called again."""
        self._release.close()

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def natural(text: str) -> list[str | int]:
    """Return a key that sorts the numbers in a text, such as an address, as numbers.

    >>> sorted(["10.0.0.10", "10.0.0.9"], key=natural)
    ['10.0.0.9', '10.0.0.10']
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def table(bundles: Mapping[str, Sequence[Bundle]], reason: str) -> str:
    """Return why bundles do not fit, what was asked, by name, and what there is."""
    rows = [("asked", name, _in_words(of_name)) for name, of_name in bundles.items()]
    for node in _nodes():
        name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        rows.append(("node", name, _has(node["Resources"])))
    rows.append(("free", "in all", _has(ray.available_resources())))
    width = max(len(name) for _, name, _ in rows)
    first = f"bundles must fit in the Ray cluster, but {reason}: ask for less, or add nodes"
    return "\n".join([first, *(f"  {kind:5}  {name:{width}}  {text}" for kind, name, text in rows)])


def _remove(group: PlacementGroup) -> None:
    with suppress(Exception):  # the cluster may be gone, and Ray would wait for it
        check()
        remove_placement_group(group)


def _in_words(bundles: Sequence[Bundle]) -> str:
    counts = Counter[str]()
    for bundle in bundles:
        text = ", ".join(f"{amount:g} {name}" for name, amount in bundle.amounts.items())
        text += f" on node {bundle.node[:8]}" if bundle.node else ""
        counts[text] += 1
    return " + ".join(f"{count} x ({text})" for text, count in counts.items()) or "nothing"


def _has(resources: Mapping[str, float]) -> str:
    hidden = re.compile(r"node:|(object_store_)?memory|accelerator_type:|bundle_group|[CG]PU_")
    shown = sorted(name for name in resources if not hidden.match(name))
    return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "nothing"


def most_on_a_node(resource: str) -> float:
    """Return how much of a resource the node with the most has."""
    return max((node["Resources"].get(resource, 0) for node in _nodes()), default=0)


def could_fit(bundles: Sequence[Bundle]) -> bool:
    """Return whether each bundle fits on one of the present nodes, and all in their sum."""
    nodes = _nodes()
    alone = all(
        any(
            all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.amounts.items())
            for node in nodes
            if bundle.node in (None, node["NodeID"])
        )
        for bundle in bundles
    )
    return alone and all(
        sum(bundle.amounts.get(name, 0) for bundle in bundles)
        <= sum(node["Resources"].get(name, 0) for node in nodes)
        for name in {name for bundle in bundles for name in bundle.amounts}
    )


def _nodes() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def smallest_of_cluster(bundles: Sequence[Bundle], timeout_s: float = 60) -> int | None:
    """Return the memory in bytes of the smallest GPU, of one on each node that bundles with GPUs
    take; None where it is not known.
    """
    with (
        suppress(ResourcesError, RayError),  # such as a node without nemorl
        RayVirtualCluster({"asked": bundles}, timeout_s=timeout_s) as cluster,
    ):
        placement = cluster.placement("asked")
        first = dict(zip(reversed(placement.nodes), reversed(placement.indices), strict=True))
        asked = [
            ray.remote(_gpu_memory)
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


def _gpu_memory() -> int:
    """In bytes; 0 where torch sees no GPU."""
    import torch

    available = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).total_memory if available else 0

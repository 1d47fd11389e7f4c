"""Named bundles of CPUs and devices on a Ray cluster, from one process to many nodes."""

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from nemorl.checks import at_least, require
from nemorl.runtime.cluster.connection import ClusterLost, Connection, RayClusterError

__all__ = [
    "DRIVER",
    "Bundle",
    "ClusterLost",
    "NodeInfo",
    "Placement",
    "RayClusterError",
    "RayVirtualCluster",
    "ResourcesError",
]

DRIVER = "driver"
"""As the node of a bundle: that of this process."""
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ResourcesError(ValueError):
    """What was asked for doesn't fit in the cluster."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one worker needs, on one node; with `node`, the id of a Ray node or DRIVER, on that one.

    >>> Bundle(cpus=2, gpus=1).amounts
    {'CPU': 2, 'GPU': 1}
    """

    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None

    def __post_init__(self) -> None:
        at_least(
            0,
            cpus=self.cpus,
            gpus=self.gpus,
            **{f"resources__{name}": amount for name, amount in self.resources.items()},
        )
        require(
            bool(self.amounts),
            "cpus",
            "must be positive where a bundle asks for nothing else",
            self.cpus,
            "use 1",
        )

    @property
    def amounts(self) -> dict[str, float]:
        """By Ray's names, without zeros."""
        return {
            name: amount
            for name, amount in {"CPU": self.cpus, "GPU": self.gpus, **self.resources}.items()
            if amount
        }


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """A node of the cluster: `resources` is all that it has, `free` what nobody uses at present."""

    id: str
    host: str
    resources: Mapping[str, float]
    free: Mapping[str, float]
    alive: bool


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bundles of one name are: worker i of a group is put into bundle i."""

    cluster: "RayVirtualCluster"
    name: str
    bundles: tuple[Bundle, ...]
    group: PlacementGroup
    indices: tuple[int, ...]
    nodes: tuple[str, ...]


class RayVirtualCluster:
    """Named groups of bundles, reserved together or not at all.

    Attaches to the cluster at `address` (or that of the variable RAY_ADDRESS; "auto": the one that
    runs on this machine), or to the one that this process is in already; else starts a local one of
    `num_cpus` and `num_gpus` (by default what the machine has), which ends with it.

    Raises ResourcesError, with what was asked and what there is, where the bundles don't fit within
    `timeout_s`, and RayClusterError where Ray can't be reached or started.
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
        require(
            strategy in STRATEGIES,
            "strategy",
            f"must be one of {', '.join(STRATEGIES)}",
            strategy,
            "use PACK",
        )
        require(
            any(bundles.values()),
            "bundles",
            "must name one bundle at least",
            dict(bundles),
            "add a Bundle()",
        )
        self.connection = Connection.use(address, num_cpus, num_gpus)
        here = self.connection.node
        self._bundles = {
            name: tuple(replace(one, node=here) if one.node == DRIVER else one for one in of_name)
            for name, of_name in bundles.items()
        }
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._placement_group: PlacementGroup | None = None
        self._released = False
        try:
            self._reserve(strategy, timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def _reserve(self, strategy: str, timeout_s: float) -> None:
        flat = [bundle for of_name in self._bundles.values() for bundle in of_name]
        never = self.connection.owned and not _can_fit(flat, self.nodes)
        if never:
            raise ResourcesError(self._table("the cluster has too little"))
        selectors = [{"ray.io/node-id": bundle.node} if bundle.node else {} for bundle in flat]
        self._placement_group = placement_group(
            [bundle.amounts for bundle in flat], strategy=strategy, bundle_label_selector=selectors
        )
        deadline = time.monotonic() + timeout_s
        while not self._placement_group.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
            self.check()
            if time.monotonic() >= deadline:
                raise ResourcesError(
                    self._table(f"no room for it was found within {timeout_s:g} s")
                )
        self._nodes = list(
            dict(
                sorted(placement_group_table(self._placement_group)["bundles_to_node_id"].items())
            ).values()
        )

    def placement(self, name: str) -> Placement:
        """Where the bundles of this name are."""
        require(
            name in self._bundles,
            "name",
            f"must be one of {', '.join(self._bundles)}",
            name,
            "name one of those that the cluster was made with",
        )
        self.check()
        before = 0
        for other, of_name in self._bundles.items():
            if other == name:
                break
            before += len(of_name)
        indices = tuple(range(before, before + len(self._bundles[name])))
        assert self._placement_group is not None
        return Placement(
            cluster=self,
            name=name,
            bundles=self._bundles[name],
            group=self._placement_group,
            indices=indices,
            nodes=tuple(self._nodes[index] for index in indices),
        )

    @property
    def nodes(self) -> list[NodeInfo]:
        """The nodes that the cluster has, and those that it had."""
        self.check()
        free = ray._private.state.available_resources_per_node()
        return [
            NodeInfo(
                id=node["NodeID"],
                host=node["NodeManagerAddress"],
                resources=node["Resources"],
                free=free.get(node["NodeID"], {}),
                alive=node["Alive"],
            )
            for node in ray.nodes()
        ]

    @property
    def driver_node(self) -> str:
        """The id of the node that this process is on."""
        return self.connection.node

    def check(self) -> None:
        """Raise ClusterLost if the cluster is gone: its head, or this node's part of it.

        Noticed within 10 s.
        """
        if self._released:
            raise RayClusterError("the bundles have been given back: make a new RayVirtualCluster")
        self.connection.check()

    def shutdown(self) -> None:
        """End the worker groups, give the bundles back, and end Ray if it was started here.

        May be called again.
        """
        if self._released:
            return
        for group in list(self._groups):
            group.shutdown()
        self._released = True
        try:
            self.connection.check()
            if self._placement_group is not None:
                remove_placement_group(self._placement_group)
        except RayClusterError:
            pass
        finally:
            self.connection.release()

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _table(self, reason: str) -> str:
        """What was asked, by name, and what each node has."""
        rows = [("asked", name, _told(of_name)) for name, of_name in self._bundles.items()]
        rows += [
            ("node", f"{node.host} ({node.id[:8]})", _has(node))
            for node in self.nodes
            if node.alive
        ]
        width = max(len(name) for _, name, _ in rows)
        lines = [f"  {kind:5}  {name:{width}}  {text}" for kind, name, text in rows]
        return "\n".join(
            [
                f"bundles must fit in the Ray cluster, but {reason}: ask for less, or add nodes",
                *lines,
            ]
        )


def _told(bundles: Sequence[Bundle]) -> str:
    """The bundles of one name in words.

    >>> _told([Bundle(cpus=2), Bundle(cpus=2), Bundle(gpus=1)])
    '2 x (2 CPU) + 1 x (1 CPU, 1 GPU)'
    """
    counts: dict[str, int] = {}
    for bundle in bundles:
        text = ", ".join(f"{amount:g} {name}" for name, amount in bundle.amounts.items()) + (
            f" on node {bundle.node[:8]}" if bundle.node else ""
        )
        counts[text] = counts.get(text, 0) + 1
    return " + ".join(f"{count} x ({text})" for text, count in counts.items()) or "nothing"


def _has(node: NodeInfo) -> str:
    shown = [
        name
        for name in node.resources
        if not name.startswith(("node:", "memory", "object_store_memory", "accelerator_type:"))
    ]
    return (
        ", ".join(
            f"{node.resources[name]:g} {name} ({node.free.get(name, 0):g} free)"
            for name in sorted(shown)
        )
        or "nothing"
    )


def _can_fit(bundles: Sequence[Bundle], nodes: Sequence[NodeInfo]) -> bool:
    """Whether an empty cluster could hold them: False only where it is certain that it can't."""
    alive = [node for node in nodes if node.alive]
    names = {name for bundle in bundles for name in bundle.amounts}
    in_all = all(
        sum(b.amounts.get(name, 0) for b in bundles) <= sum(n.resources.get(name, 0) for n in alive)
        for name in names
    )
    return in_all and all(
        any(
            all(node.resources.get(name, 0) >= amount for name, amount in bundle.amounts.items())
            for node in alive
            if bundle.node in (None, node.id)
        )
        for bundle in bundles
    )

"""Which way new weights take, by the places of the trainer's ranks and of engines."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemorl.checks import require
from nemorl.runtime.engines.spec import Place

WAYS = {
    "cuda_ipc": "by CUDA IPC, each rank's to engines on its own GPU",
    "nccl": "by NCCL from rank 0's GPU, on which they are gathered one by one",
    "object_store": "through rank 0's main memory and Ray's object store",
}
"""From the fastest."""
NEEDS = {
    "cuda_ipc": "every GPU of an engine to be a rank's",
    "nccl": "engines on other GPUs than rank 0",
}


@dataclass(frozen=True)
class Transport:
    """A value of generation.weight_transport, and why no faster one was taken."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"new weights go {WAYS[self.name]} ({self.name}{self.reason and ': '}{self.reason})"


def choose_transport(
    setting: str, ranks: Sequence[Place], engines: Sequence[Place], *, alone: bool = False
) -> Transport:
    """Return how weights get from ranks to engines, by generation.weight_transport.

    ranks: all ranks of the trainer, in order, each with its GPU. alone: rank 0 sends while others
    do not take part, for which vLLM's ipc engine would wait.

    >>> here, beside = Place("node", "host", 1, ("0",)), Place("node", "host", 2, ("1",))
    >>> print(choose_transport("auto", [here, beside], [here, beside]))
    new weights go by CUDA IPC, each rank's to engines on its own GPU (cuda_ipc)
    >>> choose_transport("auto", [here], [beside]).name
    'nccl'
    """
    gpus = {(rank.node, gpu) for rank in ranks for gpu in rank.gpus}
    theirs = {(engine.node, gpu) for engine in engines for gpu in engine.gpus}
    first = {(ranks[0].node, gpu) for gpu in ranks[0].gpus}
    on_gpus = all(each.gpus for each in (*ranks, *engines))
    works = {
        "cuda_ipc": on_gpus and theirs <= gpus and not alone,
        "nccl": on_gpus and not theirs & first,
        "object_store": True,
    }
    if setting != "auto":
        needs = NEEDS.get(setting, "")
        require(works[setting], "generation.weight_transport", f"needs {needs}", setting,
                "remove it")  # fmt: skip
        return Transport(setting, "generation.weight_transport")
    name = next(name for name, can in works.items() if can)
    faster = [f"{each} needs {NEEDS[each]}" for each in [*works][: [*works].index(name)]]
    return Transport(name, ", ".join(faster) if on_gpus else "the others need GPUs")


def places_of_ranks() -> list[Place]:
    """Return where this process's ranks are, in order; a collective call if there are several.

    A rank that has no part in Ray is on the node of one on its host that has.
    """
    places: list[Place] = [own_place()]
    if num_ranks() > 1:
        places = places * num_ranks()
        dist.all_gather_object(places, own_place())
    nodes = {place.host: place.node for place in places if place.node}
    return [replace(place, node=place.node or nodes.get(place.host, "")) for place in places]


def num_ranks() -> int:
    """Return the number of the trainer's ranks, of which this process is one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_place() -> Place:
    """Return where this process is, with the one GPU that it computes on."""
    import ray

    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = torch.cuda.current_device()
        gpus = (visible.split(",")[index] if visible else str(index),)
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    return Place(node, socket.gethostname(), os.getpid(), gpus)

"""Which way new weights take, by the places of the trainer's ranks and of engines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
REQUIRED = "as set, or as adapter_rank or pipeline_parallel_size requires"
"""Why a way is taken that `auto` did not choose."""


@dataclass(frozen=True)
class Transport:
    """A value of generation.weight_transport, and why no faster one was taken."""

    name: str
    reason: str = ""

    @property
    def remedy(self) -> str:
        """What to do where it can't work, to be added to an error."""
        if self.name == "object_store":
            return ""
        return f" (if {self.name} fails again: set generation.weight_transport object_store)"

    def __str__(self) -> str:
        return f"new weights go {WAYS[self.name]} ({self.name}{self.reason and ': '}{self.reason})"


def choose_transport(setting: str, ranks: Sequence[Place], engines: Sequence[Place]) -> Transport:
    """Return how weights get from ranks to engines, by generation.weight_transport.

    ranks: all ranks of the trainer, in order, each with its GPU. Ranks that compute on a CPU of a
    machine with GPUs all have the first one.

    >>> here, beside = Place("node", "host", 1, ("0",)), Place("node", "host", 2, ("1",))
    >>> print(choose_transport("auto", [here, beside], [here, beside]))
    new weights go by CUDA IPC, each rank's to engines on its own GPU (cuda_ipc)
    >>> choose_transport("auto", [here], [beside]).name
    'nccl'
    """
    cards, theirs = cards_of(ranks), cards_of(engines)
    on_gpus = all(each.gpus for each in (*ranks, *engines))
    works = {
        "cuda_ipc": on_gpus and theirs <= cards and len(cards) == len(ranks),
        "nccl": on_gpus and not theirs & ranks[0].cards,
        "object_store": True,
    }
    if setting != "auto":
        needs = NEEDS.get(setting, "")
        require(works[setting], "generation.weight_transport", f"needs {needs}", setting,
                "remove it")  # fmt: skip
        return Transport(setting, "as set" if setting in NEEDS else REQUIRED)
    name = next(name for name, can in works.items() if can)
    faster = [f"{each} needs {NEEDS[each]}" for each in [*works][: [*works].index(name)]]
    return Transport(name, ", ".join(faster) if on_gpus else "the others need GPUs")


def cards_of(places: Iterable[Place]) -> frozenset[tuple[str, str]]:
    """Return the GPUs of places."""
    return frozenset().union(*(place.cards for place in places))


def places_of_ranks() -> list[Place]:
    """In order; a collective call if there are several."""
    places: list[Place] = [own_place()]
    if num_ranks() > 1:
        places = places * num_ranks()
        dist.all_gather_object(places, own_place())
    return places


def num_ranks() -> int:
    """Return how many ranks train."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_place() -> Place:
    """With the one GPU that this process computes on."""
    import ray

    gpus = uuids = tuple[str, ...]()
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = torch.cuda.current_device()
        gpus = (visible.split(",")[index] if visible else str(index),)
        uuids = (uuid_of(index),)
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    return Place(node, socket.gethostname(), os.getpid(), gpus, uuids)


def uuid_of(device: torch.device | int) -> str:
    """Return a GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)

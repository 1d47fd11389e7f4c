"""How a bucket of weights is packed, by the way that it goes, and what its receivers get to open
it.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nemorl.runtime.engines.weight_buckets import Entry, Payload, aligned


@runtime_checkable
class Packer(Protocol):
    """Memory for one bucket after another."""

    used: int
    """Bytes in the present one."""

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Put a tensor into it, cast to this type."""

    def payload(self) -> Payload:
        """What the receivers get."""

    def clear(self) -> None:
        """Begin another; the receivers have all answered."""


class DirectPacker:
    """For engines in this process: the trainer's own tensors, or copies in the engine's type."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.used, self._weights = 0, list[tuple[str, Tensor]]()

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        tensor = tensor.detach().to(dtype)
        self._weights.append((name, tensor))
        self.used += aligned(tensor.nbytes)

    def payload(self) -> Payload:
        return DirectBucket(self._weights)


@dataclass(frozen=True)
class DirectBucket:
    weights: list[tuple[str, Tensor]]
    lasts: bool = True
    transfer: None = None

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self.weights

    def nearby(self) -> Payload:
        return self


class SharedPacker:
    """For engines on the same machine: memory that they map.

    It has no name anywhere, so nothing is left of it when its processes end, however.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._file = os.memfd_create("nemorl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, capacity)
        weakref.finalize(self, os.close, self._file)
        self._memory = _mapped(self._file, capacity)
        self.clear()

    def clear(self) -> None:
        self.used, self._entries = 0, list[Entry]()

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entry = Entry(name, dtype, tuple(tensor.shape), self.used)
        entry.of(self._memory).copy_(tensor.detach())
        self._entries.append(entry)
        self.used = entry.end

    def payload(self) -> Payload:
        return SharedBucket(
            os.getpid(),
            self._file,
            os.fstat(self._file).st_ino,
            self.capacity,
            tuple(self._entries),
        )


@dataclass(frozen=True)
class SharedBucket:
    """Found by the process that owns it and its file descriptor there."""

    process: int
    file: int
    inode: int
    capacity: int
    entries: tuple[Entry, ...]
    lasts: bool = False
    transfer: None = None

    def tensors(self) -> list[tuple[str, Tensor]]:
        memory = _MAPPINGS.pop((self.process, self.inode), None)
        if memory is None:
            memory = self._map()
        _MAPPINGS[self.process, self.inode] = memory
        while len(_MAPPINGS) > 2:  # a sender has two of them: others belong to one that is gone
            del _MAPPINGS[next(iter(_MAPPINGS))]
        return [(entry.name, entry.of(memory)) for entry in self.entries]

    def nearby(self) -> Payload:
        return self

    def _map(self) -> Tensor:
        try:
            file = os.open(f"/proc/{self.process}/fd/{self.file}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"this engine can't read the trainer's memory ({error}): set"
                " generation.weight_transport object_store"
            ) from error
        try:
            if os.fstat(file).st_ino != self.inode:
                raise RuntimeError(
                    "this engine sees other processes than the trainer does: set"
                    " generation.weight_transport object_store"
                )
            return _mapped(file, self.capacity)
        finally:
            os.close(file)


_MAPPINGS: dict[tuple[int, int], Tensor] = {}
"""Of a receiver: the latest memory that was mapped, kept so that its pages need not be mapped
again.
"""


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(
        mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8
    )


class ObjectPacker:
    """For engines anywhere on a Ray cluster: its object store, from which the nodes fetch a bucket
    once each.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.used, self._entries, self._tensors, self._reference = (
            0,
            list[Entry](),
            list[Tensor](),
            None,
        )

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entry = Entry(name, dtype, tuple(tensor.shape), self.used)
        self._entries.append(entry)
        self._tensors.append(tensor.detach().to("cpu", dtype).contiguous())
        self.used = entry.end

    def payload(self) -> Payload:
        import ray

        self._reference = ray.put(
            [tensor.view(-1).view(torch.uint8).numpy() for tensor in self._tensors]
        )
        self._tensors.clear()
        return ObjectBucket(self._reference, tuple(self._entries))


@dataclass(frozen=True)
class ObjectBucket:
    reference: Any
    entries: tuple[Entry, ...]
    lasts: bool = False
    transfer: None = None

    def tensors(self) -> list[tuple[str, Tensor]]:
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # that the memory is read-only: nobody writes to weights
            arrays = [torch.from_numpy(array) for array in ray.get(self.reference)]
        return [
            (entry.name, array.view(entry.dtype).view(entry.shape))
            for entry, array in zip(self.entries, arrays, strict=True)
        ]

    def nearby(self) -> Payload:
        """Only the process that Ray started has its object store: for an engine's further processes
        the bucket goes into memory that they map.
        """
        size = self.entries[-1].end
        if not _RELAY or _RELAY[0].capacity < size:
            _RELAY[:] = [SharedPacker(size)]
        _RELAY[0].clear()
        for name, tensor in self.tensors():
            _RELAY[0].add(name, tensor, tensor.dtype)
        return _RELAY[0].payload()


_RELAY: list[SharedPacker] = []
"""Of a receiver with several processes: what they map, kept like a sender's."""


def packer_for(transport: str, capacity: int) -> Packer:
    """One for buckets of at most so many bytes."""
    if transport == "shared_memory":
        return SharedPacker(capacity)
    return DirectPacker() if transport == "direct" else ObjectPacker()

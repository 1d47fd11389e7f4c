"""Weights from a trainer to engines: `WeightSender`, which runs where the trainer's weights are."""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.checks import require
from nemorl.models.adapters import merged_tensors
from nemorl.runtime.engines.spec import Place

BUCKET_BYTES = 2**26
"""64 MB, of which a sender has two: small enough that one is packed while the other is read, large
enough that the cost of a call does not matter.
"""
ALIGNMENT = 64


class WeightMismatch(ValueError):
    """The weights are not those of the engine's model."""


class EnginesFailed(Exception):
    """Engines that died, hung or raised; `reasons` by their rank."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


@dataclass(frozen=True)
class Entry:
    """Where in a bucket a tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return this tensor as a view of a bucket's bytes."""
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


class SharedMemory:
    """Memory that other processes of this machine map.

    It has no name in any folder, so nothing is left of it when its processes end, however.
    """

    capacity, _file = 0, -1
    bytes: Tensor

    def reserve(self, capacity: int) -> None:
        """Have room for so many bytes."""
        if capacity <= self.capacity:
            return
        if self.capacity:
            os.close(self._file)
        self._file = os.memfd_create("nemorl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, capacity)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.bytes = torch.frombuffer(
            mmap.mmap(self._file, capacity, flags=flags), dtype=torch.uint8
        )
        self.capacity = capacity

    def write(self, data: Any) -> None:
        self.bytes[: len(data)].numpy()[:] = data

    def address(self) -> dict[str, Any]:
        """What another process needs to map it."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return {"path": path, "inode": os.fstat(self._file).st_ino, "size": self.capacity}


@lru_cache(maxsize=2)  # of the sender's two memories
def mapped(path: str, inode: int, size: int) -> Tensor:
    """Return the memory of another process, by its `address`."""
    try:
        with Path(path).open("r+b") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                raise OSError("it is another process's")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(file.fileno(), size, flags=flags)
    except OSError as error:
        raise RuntimeError(
            f"this engine can't read the trainer's memory ({error}): set"
            " generation.weight_transport object_store"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


_MEMORIES = [SharedMemory(), SharedMemory()]
"""A sender's two, kept for the next update: their pages are there already."""


def expected_weights(config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that a model of this Hugging Face configuration (an
    object, or the text of config.json) has; tied ones once.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(config, str | bytes):
        config = AutoConfig.for_model(**json.loads(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in merged_tensors(model)}


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same weights, as long as they are the expected ones.

    Raises WeightMismatch, which lists all that does not fit, in place of the first that does not.
    """
    missing, wrong = dict(expected), []
    for name, tensor in weights:
        shape = missing.pop(name, None)
        if shape is None:
            reason = "it came twice" if name in expected else "no such parameter"
            wrong.append(f"{name!r} does not fit ({reason})")
        elif shape != tuple(tensor.shape):
            reason = f"shape {tuple(tensor.shape)}, where {shape} is expected"
            wrong.append(f"{name!r} does not fit ({reason})")
        if not wrong:
            yield name, tensor
    if wrong := wrong + [f"{name!r} is missing" for name in missing]:
        raise WeightMismatch(
            f"weights must be those of the generator's model, but {', '.join(wrong)}: use the same"
            " model on both sides"
        )


def choose_transport(
    setting: str, sender: Place, engines: Sequence[Place], *, alone: bool = True
) -> str:
    """Return how weights get from a process to engines, by generation.weight_transport and places.

    `alone`: the trainer has one rank, so that vLLM's ipc engine does not wait for others.

    >>> here = Place("node", "host", 1, ("0",))
    >>> beside = Place("node", "host", 2, ("1",))
    >>> choose_transport("auto", here, [here]), choose_transport("auto", here, [beside])
    ('cuda_ipc', 'nccl')
    """
    near = all(engine.node == sender.node for engine in engines)
    one_gpu = near and all(engine.gpus == sender.gpus for engine in engines)
    apart = all(
        engine.gpus and (engine.node != sender.node or not set(engine.gpus) & set(sender.gpus))
        for engine in engines
    )
    can = {
        "cuda_ipc": (
            bool(sender.gpus) and one_gpu and alone,
            "every engine on the trainer's one GPU",
        ),
        "nccl": (bool(sender.gpus) and apart, "engines on GPUs of their own"),
        "shared_memory": (near, "every engine on the trainer's machine"),
        "object_store": (True, ""),
    }
    if setting == "auto":
        return next(name for name, (works, _) in can.items() if works)
    works, needs = can[setting]
    require(works, "generation.weight_transport", f"needs {needs}", setting, "remove it")
    return setting


def own_place() -> Place:
    """Return where this process is, with the one GPU that it computes on."""
    import ray

    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = torch.cuda.current_device()
        gpus = (visible.split(",")[index] if visible else str(index),)
    return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid(), gpus)


class Engines:
    """The engines that take an update, called together. To vLLM's transfer engines it is a client.

    Raises EnginesFailed.
    """

    def __init__(self, actors: Mapping[int, Any], processes: int, timeout_s: float) -> None:
        self.actors, self.processes, self.timeout_s = actors, processes, timeout_s

    def start(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of each; return the calls by rank."""
        return {rank: getattr(one, method).remote(*args) for rank, one in self.actors.items()}

    def wait(self, calls: Mapping[int, Any]) -> None:
        """Wait for all of these calls."""
        import ray

        deadline, reasons = time.monotonic() + self.timeout_s, {}
        for rank, call in calls.items():
            try:
                ray.get(call, timeout=max(1.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                late = f"it took no new weights for {self.timeout_s:g} s (generation.timeout_s)"
                reasons[rank] = late
            except ray.exceptions.RayTaskError as error:
                reasons[rank] = str(error.cause)
            except ray.exceptions.RayError as error:
                reasons[rank] = str(error)
        if reasons:
            raise EnginesFailed(reasons)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        backend, calls = "nccl" if "rank_offset" in info else "ipc", {}
        for index, (rank, actor) in enumerate(self.actors.items()):
            own = dict(info)
            if backend == "nccl":
                own["rank_offset"] += index * self.processes
            message = {"backend": backend, "info": own}
            calls[rank] = actor.init_weight_transfer_engine.remote(message)
        self.wait(calls)

    def start_weight_update(self) -> None:
        self.wait(self.start("start_weight_update"))

    def update_weights(self, info: Any) -> None:
        self.wait(self.start("update_weights", info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.wait(self.start("finish_weight_update"))


@dataclass(frozen=True, kw_only=True)
class WeightSender:
    """Gives engines the weights of an iterator; may be pickled and called in another process."""

    actors: Mapping[int, Any]
    """The engines' actors, by their rank."""
    places: Mapping[int, Place]
    expected: Mapping[str, tuple[int, ...]]
    """Names and shapes that the engines' model has."""
    dtype: torch.dtype
    """The engines'. Floating point numbers are cast to it."""
    transport: str = "auto"
    processes: int = 1
    """Of each engine."""
    timeout_s: float = 300.0

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
        """Return what went wrong, by the engines' ranks: then the others, too, must be sent all
        weights again. Nothing may be generated before an update has succeeded.

        Raises WeightMismatch, before any engine has begun if the first bucket is wrong.
        """
        engines = Engines(self.actors, self.processes, self.timeout_s)
        here = own_place()
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        places = list(self.places.values())
        transport = choose_transport(self.transport, here, places, alone=alone)
        checked = checked_weights(weights, self.expected)
        try:
            if transport in ("cuda_ipc", "nccl"):
                _in_time(lambda: self._send_by_gpu(transport, checked, engines), self.timeout_s)
            else:
                far = {
                    rank
                    for rank, place in self.places.items()
                    if transport == "object_store" or place.node != here.node
                }
                self._send_buckets(checked, engines, far)
        except EnginesFailed as error:
            return error.reasons
        return {}

    def _send_buckets(
        self, weights: Iterator[tuple[str, Tensor]], engines: Engines, far: set[int]
    ) -> None:
        """While one bucket is loaded, the next one is packed into the other memory."""
        calls: dict[int, Any] = {}
        begun = False
        try:
            for memory, entries in self._buckets(weights):
                if not begun:
                    engines.start_weight_update()
                    begun = True
                waiting, calls = calls, {}
                engines.wait(waiting)
                info, data = {**memory.address(), "entries": entries}, None
                if far:
                    import ray

                    data = ray.put(memory.bytes[: _end(entries)].numpy())
                calls = {
                    rank: actor.update_weights.remote(info, data if rank in far else None)
                    for rank, actor in engines.actors.items()
                }
        finally:  # nothing may be read that the next update overwrites
            engines.wait(calls)
        engines.finish_weight_update()

    def _buckets(
        self, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[SharedMemory, list[Entry]]]:
        """Pack weights into two memories in turns. A tensor larger than a bucket has its own."""
        sizes = [math.prod(shape) * self.dtype.itemsize for shape in self.expected.values()]
        usual = min(BUCKET_BYTES, sum(sizes) + ALIGNMENT * len(sizes))
        entries: list[Entry] = []
        for name, tensor in weights:
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            entry = Entry(name, dtype, tuple(tensor.shape), _end(entries))
            if entries and entry.offset + entry.num_bytes > BUCKET_BYTES:
                yield _MEMORIES[0], entries
                _MEMORIES.reverse()
                entries, entry = [], Entry(name, dtype, entry.shape, 0)
            if not entries:
                _MEMORIES[0].reserve(max(entry.num_bytes, usual))
            entry.of(_MEMORIES[0].bytes).copy_(tensor.detach())
            entries.append(entry)
        yield _MEMORIES[0], entries
        _MEMORIES.reverse()

    def _send_by_gpu(
        self, transport: str, weights: Iterator[tuple[str, Tensor]], engines: Engines
    ) -> None:
        """Use vLLM's own transfer engine, which stays connected until the engines change."""
        key = (transport, *map(str, self.actors.values()))
        transfer = _CONNECTED.pop(key, None)
        if transfer is None:
            while _CONNECTED:
                _, old = _CONNECTED.popitem()  # its end may wait for engines that are gone
                threading.Thread(target=old.shutdown, daemon=True).start()
            transfer = self._connect(transport, engines)
        transfer.client, transfer.source = engines, _Source(self, weights)
        transfer.send_weights()
        _CONNECTED[key] = transfer

    def _connect(self, transport: str, engines: Engines) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        info: Any
        size = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES}
        if transport == "cuda_ipc":
            info = IPCTrainerInitInfo(rank=0, **size)
        else:
            world = 1 + self.processes * len(self.actors)
            info = NCCLTrainerInitInfo(get_ip(), get_open_port(), world, rank=0, **size)
        source = _Source(self, iter(()))
        return WeightTransferTrainerFactory.trainer_init(info, client=engines, source=source)


_CONNECTED: dict[Any, Any] = {}


class _Source:
    """What vLLM's transfer engines call a WeightSource."""

    def __init__(self, sender: WeightSender, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.sender, self.weights = sender, weights

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        expected = self.sender.expected.items()
        return [ParamMeta(name, self.sender.dtype, shape) for name, shape in expected]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), expected in zip(self.weights, self.sender.expected, strict=True):
            if name != expected:
                raise ValueError(
                    f"weights must come in the model's order through GPUs, but {name!r} came before"
                    f" {expected!r}: set generation.weight_transport object_store"
                )
            yield name, tensor.detach().to(DEVICE, self.sender.dtype)


DEVICE = "cuda"


def _end(entries: Sequence[Entry]) -> int:
    """Where the next tensor may begin."""
    last = entries[-1] if entries else None
    return 0 if last is None else -(-(last.offset + last.num_bytes) // ALIGNMENT) * ALIGNMENT


def _in_time(function: Callable[[], None], timeout_s: float) -> None:
    """Call it in a thread that the process's end doesn't wait for, on this thread's device.

    Raises TimeoutError, or what it raises.
    """
    done: Future[None] = Future()
    module = torch.get_device_module(DEVICE)
    current = module.current_device()

    def run() -> None:
        try:
            module.set_device(current)
            function()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="nemorl-transfer", daemon=True).start()
    try:
        done.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(
            f"the weights were not through within {timeout_s:g} s (generation.timeout_s): where a"
            " network hangs, set generation.weight_transport object_store"
        ) from None

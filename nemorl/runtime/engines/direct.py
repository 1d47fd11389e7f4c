"""Weights from the trainer's GPUs to engines', through vLLM's own transfer engines."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemorl.runtime.engines.transport import num_ranks

DEVICE = "cuda"
ROUND_BYTES = 2**28
"""So many are sent at a time."""


class EnginesFailed(Exception):
    """Engines that died, hung or raised. Its argument says why, by their rank."""


def send_by_ipc(sender: Any, weights: Iterable[tuple[str, Tensor]], *, opened: bool = True) -> None:
    """Hand out weights in this rank's GPU to engines on the same; a collective call of all ranks.

    opened: whether an engine is on this GPU.

    Raises: EnginesFailed, once all ranks are through; what the weights raise, on all ranks alike.
    """
    client = _Client(sender)
    transfer, key = _connected("cuda_ipc", sender, client)
    transfer.client, transfer.source = client, _Source(sender.dtype, weights)
    with nullcontext() if opened else _given_back(transfer):
        transfer.send_weights()
    if client.error is not None:
        raise client.error
    _CONNECTED[key] = transfer


@contextmanager
def _given_back(transfer: Any) -> Iterator[None]:
    """Give the buffer of a transfer back, as an engine does that has opened it."""
    gather, found = transfer._all_gather_and_merge_handles, list[Any]()

    def gathered(handles: list[dict[str, Any]]) -> Any:
        if not found:  # all rounds of a transfer share it
            found.extend(handles[0].values())
            for *_, counter, offset, _, _ in found:
                torch.UntypedStorage._release_ipc_counter(counter, offset, device=DEVICE)
        return gather(handles)

    transfer._all_gather_and_merge_handles = gathered
    try:
        yield
    finally:
        del transfer._all_gather_and_merge_handles


def send_by_nccl(sender: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Broadcast weights from this GPU to engines on other ones.

    Engines hear before each round which weights it has: backends yield them in orders of their own.
    """
    transfer, key = _connected("nccl", sender, sender)
    transfer.client = _Rounds(sender)
    sender.start_weight_update()
    for part in _rounds(weights):
        transfer.source = _Source(sender.dtype, part)
        # vLLM packs on streams of its own, which do not wait for the one that gathers and casts.
        torch.get_device_module(DEVICE).synchronize()
        transfer.send_weights()
        part.clear()  # or it would stay on the GPU until the next round, or the next update
    sender.finish_weight_update()
    _CONNECTED[key] = transfer


def _rounds(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    part, size = list[tuple[str, Tensor]](), 0
    for name, tensor in weights:
        part.append((name, tensor))
        size += tensor.nbytes
        if size >= ROUND_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _connected(transport: str, sender: Any, client: Any) -> tuple[Any, Any]:
    """Return vLLM's transfer engine, to be put back after a transfer, and its key."""
    key = (transport, *sender.places.values())
    transfer = _CONNECTED.pop(key, None)
    if transfer is None:
        while _CONNECTED:
            _, old = _CONNECTED.popitem()  # its end may wait for engines that are gone
            threading.Thread(target=old.shutdown, daemon=True).start()
        transfer = _connect(transport, sender, client)
    return transfer, key


_CONNECTED: dict[Any, Any] = {}


def _connect(transport: str, sender: Any, client: Any) -> Any:
    import ray
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from nemorl.runtime.workers.worker import free_port

    info: Any
    if transport == "cuda_ipc":
        rank = torch.distributed.get_rank() if num_ranks() > 1 else 0
        sizes = [math.prod(shape) * sender.dtype.itemsize for shape in sender.expected.values()]
        largest = max([ROUND_BYTES, *sizes])  # every tensor has to fit in the shared buffer
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=largest)
    else:
        world = 1 + sender.processes * len(sender.actors)
        size = {"packed": True, "packed_buffer_size_bytes": ROUND_BYTES // 4}
        info = NCCLTrainerInitInfo(
            rank=0,
            world_size=world,
            master_address=ray.util.get_node_ip_address(),
            master_port=free_port(),
            **size,
        )
    source = _Source(sender.dtype, ())
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


@dataclass
class _Client:
    """Calls engines until one fails, after which the ranks' collectives go on without them."""

    sender: Any
    error: EnginesFailed | None = None

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, info: Any) -> None:
        self._call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, *args: Any) -> None:
        try:
            if self.error is None:
                getattr(self.sender, method)(*args)
        except EnginesFailed as error:
            self.error = error


@dataclass
class _Rounds:
    """Calls engines for one round of an update."""

    sender: Any

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: Any) -> None:
        self.sender.update_weights(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class _Source:
    """What vLLM's transfer engines call a WeightSource."""

    dtype: torch.dtype
    weights: Iterable[tuple[str, Tensor]]

    def metadata(self) -> list[Any]:
        """Of a round, which is a list."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.dtype, tuple(each.shape)) for name, each in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            yield name, tensor.detach().to(DEVICE, self.dtype)

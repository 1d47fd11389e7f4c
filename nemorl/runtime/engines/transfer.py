"""Weights from GPU to GPU by vLLM's own transfer engines:

CUDA IPC on one GPU, NCCL between several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nemorl.runtime.engines.weight_buckets import wire_dtype
from nemorl.runtime.engines.weight_transport import Fleet, Receiver


@dataclass(frozen=True)
class Message:
    """For the transfer engine of an engine's workers:

    `init` or `update`, and the information that it takes.
    """

    transfer: tuple[str, dict[str, Any]]
    lasts: bool = True

    def tensors(self) -> list[tuple[str, Tensor]]:
        raise RuntimeError("the weights come by the workers' own transfer engine")

    def nearby(self) -> Message:
        return self


class EngineTransfer:
    """The trainer's end.

    To vLLM it is what it calls a source (`metadata` and iteration) and a client (the four methods
    at the end).
    """

    device = "cuda"

    def __init__(
        self,
        transport: str,
        expected: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        processes: int,
        bucket_bytes: int,
    ) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "generation.weight_transport must be shared_memory or object_store where there is"
                f" no GPU, but it is {transport!r}: leave it out"
            )
        self.transport, self.expected, self.dtype = transport, expected, dtype
        self.processes, self.bucket_bytes = processes, bucket_bytes
        self._engine: Any = None
        self._members: list[Receiver] = []

    def send(self, weights: Iterable[tuple[str, Tensor]], fleet: Fleet) -> None:
        """Between begin_weights() and finish_weights().

        With NCCL a failure on the way is everybody's: its group is no more.
        """
        from nemorl.runtime.cluster.workers import WorkerTimeout

        self._fleet, self._weights = fleet, weights
        live, before = fleet.live, len(fleet.failed)
        if not live:
            return
        try:
            _in_time(
                partial(self._send, [fleet.receivers[index] for index in live]),
                fleet.timeout_s,
                self.device,
            )
            if self.transport == "nccl" and len(fleet.failed) > before:
                raise RuntimeError("the group is broken")
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = WorkerTimeout(
                    f"the weights were not through by {self.transport} within {fleet.timeout_s:g} s"
                    " (generation.timeout_s): where a network hangs, set"
                    " generation.weight_transport object_store"
                )
            cause = next(
                islice(fleet.failed.values(), before, None), error
            )  # who died has broken it for the others
            for index in fleet.live:
                fleet.failed[index] = cause
            self.close()

    def close(self) -> None:
        """Doesn't wait: an engine's end may be waiting for receivers that are gone."""
        if self._engine is not None:
            threading.Thread(
                target=self._engine.shutdown, name="nemorl-transfer-end", daemon=True
            ).start()
        self._engine, self._members = None, []

    def _send(self, members: list[Receiver]) -> None:
        if self.transport == "cuda_ipc" or members != self._members:
            self.close()
            self._members = members
            self._engine = self._connect()
        self._engine.send_weights()

    def _connect(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        info: Any
        if self.transport == "cuda_ipc":
            info = IPCTrainerInitInfo(
                rank=0, packed=True, packed_buffer_size_bytes=self.bucket_bytes
            )
        else:
            world_size = 1 + self.processes * len(self._members)
            info = NCCLTrainerInitInfo(
                get_ip(),
                get_open_port(),
                world_size,
                rank=0,
                packed_buffer_size_bytes=self.bucket_bytes,
            )
        return WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.dtype, shape) for name, shape in self.expected.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), expected in zip(self._weights, self.expected, strict=True):
            if name != expected:
                raise ValueError(
                    f"weights must come in the model's order for {self.transport}, but {name!r}"
                    f" came before {expected!r}: use shared_memory"
                )
            yield name, tensor.detach().to(self.device, wire_dtype(tensor.dtype, self.dtype))

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        offset = info.get("rank_offset")
        calls = {}
        for position, index in enumerate(self._fleet.live):
            own = (
                info
                if offset is None
                else {**info, "rank_offset": offset + position * self.processes}
            )
            calls[index] = self._fleet.receivers[index].start(
                "load_weights", Message(("init", own))
            )
        self._fleet.gather(calls)

    def start_weight_update(self) -> None:
        """Done by begin_weights(), which every receiver has."""

    def update_weights(self, info: Any) -> None:
        self._fleet.gather(self._fleet.start("load_weights", Message(("update", info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Done by finish_weights()."""


def _in_time(function: Callable[[], None], timeout_s: float, device: str) -> None:
    """Call it in a thread that nobody waits for at the end of the process, on this thread's device.

    Raises TimeoutError, or what it raises.
    """
    done: Future[None] = Future()
    module = torch.get_device_module(device)
    current = module.current_device()

    def run() -> None:
        try:
            module.set_device(current)
            function()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="nemorl-transfer", daemon=True).start()
    done.result(timeout_s)

"""How weights get from a trainer to engines elsewhere:

`WeightSender`, which streams them in buckets to all receivers at once.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from nemorl.checks import require
from nemorl.runtime.engines.weight_buckets import (
    BUCKET_BYTES,
    BucketCutter,
    Entry,
    aligned,
    checked_weights,
    wire_dtype,
)
from nemorl.runtime.engines.weight_packers import Packer, packer_for

Transport = Literal["direct", "shared_memory", "object_store", "cuda_ipc", "nccl"]


def choose_transport(
    setting: str,
    *,
    cuda: bool,
    same_machine: bool,
    one_gpu: bool = False,
    separate_gpus: bool = False,
) -> Transport:
    """What generation.weight_transport means for engines in other processes.

    `same_machine`: all of them are where the trainer is; `one_gpu`: and on its GPU;
    `separate_gpus`: no GPU of theirs is the trainer's.

    >>> choose_transport("auto", cuda=False, same_machine=True), choose_transport("auto", cuda=True, same_machine=True, one_gpu=True)
    ('shared_memory', 'cuda_ipc')
    """
    can: dict[Transport, tuple[bool, str]] = {
        "cuda_ipc": (cuda and same_machine and one_gpu, "every engine on the trainer's own GPU"),
        "nccl": (cuda and separate_gpus, "engines on GPUs of their own"),
        "shared_memory": (
            same_machine and hasattr(os, "memfd_create"),
            "every engine on the trainer's machine, under Linux",
        ),
        "object_store": (True, ""),
    }
    if setting == "auto":
        return next(name for name, (works, _) in can.items() if works)
    chosen: Transport = setting  # type: ignore[assignment]
    works, needs = can[chosen]
    require(
        works,
        "generation.weight_transport",
        f"needs {needs}",
        setting,
        "leave it out for the fastest that works",
    )
    return chosen


@runtime_checkable
class Pending(Protocol):
    """A call on its way."""

    def result(self, timeout_s: float | None = None) -> Any:
        """Its answer; raises what it raised, or an error of its own when the receiver is gone or
        the time is over.
        """


@runtime_checkable
class Receiver(Protocol):
    """An engine somewhere, with the methods begin_weights(), load_weights(payload) and
    finish_weights().
    """

    def start(self, method: str, *args: Any) -> Pending:
        """Call a method of the engine without waiting for it.

        One that is called while another runs waits for it.
        """


class LocalReceiver:
    """An engine in this process: calls are done when `start` returns."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def start(self, method: str, *args: Any) -> Pending:
        try:
            return _Done(getattr(self.engine, method)(*args), None)
        except Exception as error:
            return _Done(None, error)


@dataclass(frozen=True)
class _Done:
    value: Any
    error: Exception | None

    def result(self, timeout_s: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Fleet:
    """Receivers that are called together.

    One that fails is left out from then on; the others go on.
    """

    def __init__(self, receivers: Sequence[Receiver], timeout_s: float) -> None:
        self.receivers, self.timeout_s = receivers, timeout_s
        self.failed: dict[int, Exception] = {}

    @property
    def live(self) -> list[int]:
        return [index for index in range(len(self.receivers)) if index not in self.failed]

    def start(self, method: str, *args: Any) -> dict[int, Pending]:
        """Call a method of all that still live."""
        calls = {}
        for index in self.live:
            try:
                calls[index] = self.receivers[index].start(method, *args)
            except Exception as error:
                self.failed[index] = error
        return calls

    def gather(self, calls: Mapping[int, Pending]) -> None:
        """Wait for all of them but those that have failed before; who has raised or has not
        answered in time has failed.
        """
        deadline = time.monotonic() + self.timeout_s
        for index in [index for index in calls if index not in self.failed]:
            try:
                calls[index].result(timeout_s=max(deadline - time.monotonic(), 1.0))
            except Exception as error:
                self.failed.setdefault(index, error)


class WeightSender:
    """Sends the weights of one model, again and again. Its memory (at most two buckets) stays with
    it, so that its pages are there already.

    `expected` are the names and shapes that the engines' model has (`expected_weights`), `dtype` is
    the engines'. cuda_ipc and nccl are vLLM's own; for them `processes` tells how many each
    receiver has.
    """

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        transport: Transport,
        processes: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        self.expected, self.dtype, self.timeout_s = expected, dtype, timeout_s
        self.transport, self.processes = transport, processes
        self._sizes = {
            name: aligned(Entry(name, dtype, shape).num_bytes) for name, shape in expected.items()
        }
        self._cutter = BucketCutter(self._sizes, bucket_bytes)
        self._packers: list[Packer] = []
        self._transfer: Any = None

    def send(
        self, weights: Iterable[tuple[str, Tensor]], receivers: Sequence[Receiver]
    ) -> dict[int, Exception]:
        """Give all receivers these weights; what went wrong with which of them. Those that are not
        in the answer have the new weights.

        A receiver that failed, and each one if this raises, must not be used until a later `send`
        has succeeded: unless it raised WeightMismatch for the first bucket, before which no
        receiver is asked to begin.
        """
        fleet = Fleet(receivers, self.timeout_s)
        checked = checked_weights(weights, self.expected)
        if self.transport in ("cuda_ipc", "nccl"):
            self._send_by_engine(checked, fleet)
        else:
            self._send_buckets(checked, fleet)
        fleet.gather(fleet.start("finish_weights"))
        return fleet.failed

    def close(self) -> None:
        """Give the memory back."""
        self._packers.clear()
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _send_buckets(self, weights: Iterable[tuple[str, Tensor]], fleet: Fleet) -> None:
        """While receivers load one bucket the next is packed: into the memory of the one before,
        which they are through with.
        """
        if not self._packers:
            self._packers = [packer_for(self.transport, self._cutter.capacity) for _ in range(2)]
        under_way: deque[dict[int, Pending]] = deque()
        begun = False

        def ship() -> None:
            nonlocal begun
            if not begun:
                fleet.gather(fleet.start("begin_weights"))
                begun = True
            under_way.append(fleet.start("load_weights", self._packers[0].payload()))
            self._packers.reverse()
            if len(under_way) == 2:
                fleet.gather(under_way.popleft())
            self._packers[0].clear()

        self._packers[0].clear()
        try:
            for name, tensor in weights:
                if not self._cutter.fits(name, self._packers[0].used):
                    ship()
                self._packers[0].add(name, tensor, wire_dtype(tensor.dtype, self.dtype))
            ship()
        finally:  # also when the trainer's side fails: nothing may be read that the next update overwrites
            while under_way:
                fleet.gather(under_way.popleft())
            for packer in self._packers:
                packer.clear()

    def _send_by_engine(self, weights: Iterable[tuple[str, Tensor]], fleet: Fleet) -> None:
        from nemorl.runtime.engines.transfer import EngineTransfer

        if self._transfer is None:
            self._transfer = EngineTransfer(
                self.transport,
                self.expected,
                self.dtype,
                processes=self.processes,
                bucket_bytes=self._cutter.capacity,
            )
        fleet.gather(fleet.start("begin_weights"))
        self._transfer.send(weights, fleet)

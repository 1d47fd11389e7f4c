"""One rank: the training backend on its part of the model, called by name, and able to say what it
is doing while it does it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nemorl.parallel.config import BackendConfig
from nemorl.runtime.cluster.worker_host import in_words
from nemorl.runtime.engines.weight_buckets import BUCKET_BYTES, Payload, aligned
from nemorl.runtime.engines.weight_packers import Packer, packer_for
from nemorl.runtime.ranks.group import Answer, Status

IDLE = "waiting for a call"
BESIDE = frozenset({"wait_for_checkpoint"})
"""Methods that only wait for what goes on in the background: they run on a thread of their own,
beside the other calls.
"""


class TrainingRank:
    """Hosts what `make` makes. All ranks get the same calls in the same order; `perform` is always
    called on the same thread.

    Exported weights leave rank 0 in buckets by `transport` (see `weight_packers.packer_for`;
    "direct": its reader is in this process, which also gets exceptions as they are); the other
    ranks gather them, too, and drop them.
    """

    def __init__(self, make: Callable[[], Any], rank: int, *, transport: str) -> None:
        self.rank, self._make, self._transport = rank, make, transport
        self._in_driver = transport == "direct"
        self._backend: Any = None
        self._exports: dict[int, WeightExport] = {}
        self._packers: list[Packer] = []
        self._phase, self._since, self._thread = IDLE, time.monotonic(), threading.get_ident()

    def perform(self, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Answer:
        """Do one call."""
        self._phase, self._since, self._thread = method, time.monotonic(), threading.get_ident()
        try:
            return self._answer(
                lambda: getattr(self, f"_{method}", None) or getattr(self._ready(), method),
                args,
                kwargs,
            )
        finally:
            self._phase, self._since = IDLE, time.monotonic()

    def beside(self, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Answer:
        """Do one of those that may go on while others are performed."""
        return self._answer(lambda: getattr(self._ready(), method), args, kwargs)

    def refuse(self, error: BaseException) -> Answer:
        """The answer to a call that failed, or that can't even be read. The log gets the traceback."""
        words = in_words(error)
        if not self._in_driver:
            print(words["traceback"], file=sys.stderr, flush=True)
        return Answer("error", words, self._step(), error if self._in_driver else None)

    def status(self) -> Status:
        """What it is doing; for other threads than the one that does it."""
        phase, since, frame = self._phase, self._since, sys._current_frames().get(self._thread)
        frames = tuple(_told(frame)) if phase != IDLE else ()
        return Status(
            rank=self.rank,
            step=self._step(),
            phase=phase,
            seconds=time.monotonic() - since,
            frames=frames,
        )

    def _answer(
        self, find: Callable[[], Callable[..., Any]], args: tuple, kwargs: Mapping[str, Any]
    ) -> Answer:
        try:
            value = find()(*args, **kwargs)
        except BaseException as error:
            return self.refuse(error)
        return Answer("value", value if self.rank == 0 else None, self._step())

    def _step(self) -> int:
        return int(getattr(self._backend, "step", 0))

    def _ready(self) -> Any:
        if self._backend is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._backend

    def _setup(self, config: BackendConfig) -> None:
        if (
            torch.cuda.is_available()
            and torch.cuda.device_count() == 1
            and config.trainer.device in (None, "cuda")
        ):
            config = replace(
                config, trainer=replace(config.trainer, device="cuda:0")
            )  # as Ray gives each process the sight of its own alone
        self._backend = self._make()
        self._backend.setup(config)

    def _export_open(self, export: int, closed: Sequence[int], options: Mapping[str, Any]) -> None:
        """Begin to export the weights; forget exports whose reader is through, or gone: all ranks
        have stopped at the same place.
        """
        for other in closed:
            if other in self._exports:
                self._packers += self._exports.pop(other).packers
        weights, packers = (
            self._ready().export_weights(**options),
            [self._packers.pop() for _ in self._packers[:2]],
        )
        self._exports[export] = WeightExport(
            weights, packers, self._transport if self.rank == 0 else None
        )

    def _export_next(self, export: int) -> Payload | bool | None:
        return self._exports[export].next()

    def _send_weights(self, send: Callable[[Any], Any], options: Mapping[str, Any]) -> Any:
        """`send`'s result, or its error in words: all ranks go through all weights, so that they
        stay usable.
        """
        weights, found = self._ready().export_weights(**options), (None, None)
        if self.rank == 0:
            try:
                found = send(weights), None
            except Exception as error:
                found = None, self.refuse(error)
        for _ in weights:
            pass
        return found

    def _shutdown(self) -> None:
        self._exports.clear()
        self._packers.clear()
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None


class WeightExport:
    """A stream of weights, cut into buckets at the same places on all ranks; with a `transport`
    they are packed, else dropped.

    Two packers take turns, so that one bucket can be read while the next is filled.
    """

    def __init__(
        self,
        weights: Iterator[tuple[str, Tensor]],
        packers: list[Packer],
        transport: str | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._weights, self.packers, self._transport, self._bucket_bytes = (
            weights,
            packers,
            transport,
            bucket_bytes,
        )
        self._held: tuple[str, Tensor] | None = None

    def next(self) -> Payload | bool | None:
        """The next bucket (True where it is dropped); None when there are no more."""
        packer, used, empty = None, 0, True
        while (item := self._take()) is not None:
            name, tensor = item
            size = aligned(tensor.nbytes)
            if not empty and used + size > self._bucket_bytes:
                self._held = item
                break
            if self._transport is not None:
                packer = packer or self._packer(max(size, self._bucket_bytes))
                packer.add(name, tensor, tensor.dtype)
            used, empty = used + size, False
        return None if empty else True if packer is None else packer.payload()

    def _take(self) -> tuple[str, Tensor] | None:
        held, self._held = self._held, None
        return held or next(self._weights, None)

    def _packer(self, capacity: int) -> Packer:
        """The one that was not used last, emptied; a larger one in its place where need be."""
        found = self.packers.pop(0) if len(self.packers) == 2 else None
        if found is None or getattr(found, "capacity", capacity) < capacity:
            found = packer_for(str(self._transport), capacity)
        found.clear()
        self.packers.append(found)
        return found


def _told(frame: FrameType | None) -> Iterator[str]:
    """A stack, innermost first, as file:line function."""
    while frame is not None:
        name = frame.f_code.co_filename
        short = (
            name.split("site-packages/")[-1]
            if "site-packages/" in name
            else "/".join(name.split("/")[-3:])
        )
        yield f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back

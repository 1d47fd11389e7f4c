"""One rank: the training backend on its part of the model, called by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemorl.parallel.backend import as_training_backend
from nemorl.parallel.config import BackendConfig
from nemorl.runtime.run.errors import in_words

BACKGROUND = frozenset({"wait_for_checkpoint"})
"""Methods that run on a thread of their own, while other calls go on."""
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a call."""

    value: Any
    """The result on rank 0; None on the others."""
    error: Mapping[str, str] | None
    """What was raised, as `in_words` has it."""
    step: int
    """Optimizer steps begun, after the call."""


class Rank:
    """Hosts the backend that `make` makes. All ranks get the same calls in order."""

    def __init__(self, make: Callable[[], Any], rank: int) -> None:
        self.rank, self._make = rank, make
        self._backend: Any = None
        self._weights: Iterator[tuple[str, Tensor]] = iter(())

    @property
    def step(self) -> int:
        return int(getattr(self._backend, "step", 0))

    def perform(self, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Answer:
        """Do one call; errors are part of the answer, with their traceback in the log."""
        try:
            return Answer(self.do(method, args, kwargs), None, self.step)
        except BaseException as error:
            return self.refuse(error)

    def refuse(self, error: BaseException) -> Answer:
        """Return the answer to a call that failed, or that cannot be read."""
        words = in_words(error)
        print(words["traceback"], file=sys.stderr, flush=True)
        return Answer(None, words, self.step)

    def do(self, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Do one call; return its result on rank 0."""
        call = getattr(self, f"_{method}", None) or getattr(self._ready(), method)
        value = call(*args, **kwargs)
        return value if self.rank == 0 else None

    def _ready(self) -> Any:
        if self._backend is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._backend

    def _setup(self, config: BackendConfig) -> None:
        alone = torch.cuda.is_available() and torch.cuda.device_count() == 1  # Ray shows one each
        if alone and config.trainer.device in (None, "cuda"):
            config = replace(config, trainer=replace(config.trainer, device="cuda:0"))
        self._backend = as_training_backend(self._make())
        self._backend.setup(config)

    def _export_open(self, **options: Any) -> None:
        self._weights = self._ready().weights(**options)

    def _export_next(self) -> list[tuple[str, Tensor]]:
        """Gather some 64 MB more; none at the end."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._weights:
            size += tensor.nbytes
            if self.rank == 0:
                bucket.append((name, tensor))
            if size >= BUCKET_BYTES:
                break
        return bucket

    def _send_weights(self, send: Callable[[Any], Any], **options: Any) -> Any:
        """Return `send`'s result and its error; all ranks go through all weights in any case."""
        weights = self._ready().weights(**options)
        found: tuple[Any, Any] = (None, None)
        if self.rank == 0:
            try:
                found = send(weights), None
            except Exception as error:
                found = None, self.refuse(error).error
        for _ in weights:
            pass
        return found

    def _shutdown(self) -> None:
        self._weights = iter(())
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None

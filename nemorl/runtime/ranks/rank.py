"""One rank: training backends, each on its part of a model, called by name."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from nemorl.parallel.backend import as_training_backend
from nemorl.parallel.config import BackendConfig
from nemorl.runtime.store.files import FailedAlone, in_words

BACKGROUND = frozenset({"wait_for_checkpoint"})
"""Methods that run on a thread of their own, while other calls go on."""
BUCKET_BYTES = 64 << 20
Coordinates = tuple[int, int]
"""A rank's number among those with other rows, and in the pipeline."""
Fetch = Callable[[Coordinates], Any]


@dataclass(frozen=True)
class Answer:
    value: Any
    """The result on rank 0; None on the others."""
    error: Mapping[str, str] | None
    """Exception of the rank, as `in_words` returns it."""
    step: int
    """Optimizer steps begun, after the call."""


class Rank:
    """Hosts backends that `make` makes, by name. All ranks get the same calls in order.

    The keyword `backend` of a call says which one it is for.
    """

    def __init__(self, make: Callable[[], Any], rank: int) -> None:
        self.rank, self._make = rank, make
        self._backends: dict[str, Any] = {}
        self._name = ""
        """The backend of the last call that was not in the background."""
        self._exports: dict[str, Iterator[tuple[str, Tensor]]] = {}

    @property
    def step(self) -> int:
        return int(getattr(self._backends.get(self._name), "step", 0))

    def perform(
        self, method: str, args: tuple, kwargs: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Answer:
        """Do one call; errors are part of the answer, with their traceback in the log."""
        try:
            return Answer(self.do(method, args, kwargs, fetch), None, self.step)
        except BaseException as error:
            return self.refuse(error)

    def refuse(self, error: BaseException) -> Answer:
        words = in_words(error)
        print(words["traceback"], file=sys.stderr, flush=True)
        return Answer(None, words, self.step)

    def do(
        self, method: str, args: tuple, kwargs: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Any:
        """fetch: returns the routes of a batch, the first argument, that are this rank's."""
        name = kwargs.get("backend", "")
        if fetch is not None:
            routes = fetch(self.coordinates(name))
            args = (replace(args[0], routed_experts=routes), *args[1:])
        options = {key: value for key, value in kwargs.items() if key != "backend"}
        if method in BACKGROUND:
            call = getattr(self._ready(name), method)
        else:
            self._name = name
            call = getattr(self, f"_{method}", None) or getattr(self._ready(name), method)
        value = call(*args, **options)
        return value if self.rank == 0 else None

    def coordinates(self, name: str = "") -> Coordinates:
        return self._ready(name).place

    def _ready(self, name: str) -> Any:
        if name not in self._backends:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._backends[name]

    def _setup(self, config: BackendConfig) -> None:
        alone = torch.cuda.is_available() and torch.cuda.device_count() == 1  # Ray shows one each
        if alone and config.trainer.device in (None, "cuda"):
            config = replace(config, trainer=replace(config.trainer, device="cuda:0"))
        backend = self._backends[self._name] = as_training_backend(self._make())
        backend.setup(config)

    def _cutting(self) -> Any:
        """None for a backend that takes batches whole."""
        return getattr(self._ready(self._name), "cutting", None)

    def _export_open(self, **options: Any) -> None:
        self._exports[self._name] = self._ready(self._name).weights(**options)

    def _export_next(self) -> list[tuple[str, Tensor]]:
        """Gather some 64 MB more; none at the end."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._exports[self._name]:
            size += tensor.nbytes
            if self.rank == 0:
                bucket.append((name, tensor))
            if size >= BUCKET_BYTES:
                break
        return bucket

    def _send_weights(
        self, send: Callable[[Any], Any], together: bool = False, **options: Any
    ) -> Any:
        """Return `send`'s result and its error; all ranks go through all weights."""
        weights = self._ready(self._name).weights(**options)
        found: tuple[Any, Any] = (None, None)
        if self.rank == 0 or together:
            try:
                found = send(weights), None
            except FailedAlone:
                raise
            except Exception as error:
                found = None, self.refuse(error).error
        for _ in weights:
            pass
        return found

    def _release(self) -> None:
        self._exports.pop(self._name, None)
        if (backend := self._backends.pop(self._name, None)) is not None:
            backend.shutdown()

    def _shutdown(self) -> None:
        for name in [*self._backends]:
            self._name = name
            self._release()


LARGE = 1 << 20
"""From so many bytes on, a tensor travels beside the pickled object, without a copy."""


def dumps(value: Any) -> list[Any]:
    """Return the pickled object, and the numbers of its large tensors.

    >>> loads(dumps({"x": torch.ones(2, dtype=torch.bfloat16), "f": lambda x: x + 1}))["f"](1)
    2
    """
    file, large = io.BytesIO(), []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        array = np.frombuffer(buffer.raw(), np.uint8)
        if array.nbytes >= LARGE:
            large.append(array)
        return array.nbytes < LARGE

    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(value)
    return [file.getvalue(), *large]


def loads(data: Sequence[Any]) -> Any:
    """Return what `dumps` was given. It can run any code: only for processes of the same run."""
    return pickle.loads(data[0], buffers=data[1:])


class _Pickler(cloudpickle.Pickler):
    """torch's own way is ten times slower for the many small tensors of a step's metrics."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            flat = obj.detach().cpu().contiguous().view(-1)
            data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            return _tensor, (data, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if memoryview(data).readonly:  # in Ray's memory
        data = bytearray(data)
    return torch.frombuffer(data, dtype=dtype).view(shape)

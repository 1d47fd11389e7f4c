"""One rank: training backends, each on its part of a model, called by name; and torchrun's ranks.

Rank 0 of torchrun runs the loop, the others obey it. An error ends its process; torchrun then ends
the others, and may start all again.
"""

import io
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.checks import require
from nemorl.parallel.backend import as_training_backend
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.world import start_process_group
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.engines.weights import BUCKET_BYTES, NamedTensor, Place, buckets
from nemorl.runtime.store.files import FailedAlone, in_words

BACKGROUND = frozenset({"wait_for_checkpoint"})
"""Methods that run on a thread, while other calls go on."""
Coordinates = tuple[int, int]
"""The number of a rank's rows, and its place in the pipeline."""
Fetch = Callable[[Coordinates], Any]


@dataclass(frozen=True)
class RankAnswer:
    value: Any
    """The result on rank 0; None on the others."""
    error: Mapping[str, str] | None
    """Of `in_words`."""
    step: int
    """Optimizer steps begun."""


class Rank:
    """Hosts backends that `make` makes, by name: a call's keyword `backend`."""

    def __init__(self, make: Callable[[], Any], rank: int) -> None:
        self.rank, self._make = rank, make
        self._backends: dict[str, Any] = {}
        self._name = ""
        """Of the last call that was not in the background."""
        self._exports: dict[str, Iterator[list[NamedTensor]]] = {}

    @property
    def step(self) -> int:
        return int(getattr(self._backends.get(self._name), "step", 0))

    def perform(self, *call: Any) -> RankAnswer:
        """`do` one call; an error is part of the answer, with its traceback in the log."""
        try:
            return RankAnswer(self.do(*call), None, self.step)
        except BaseException as error:
            return self.refuse(error)

    def refuse(self, error: BaseException) -> RankAnswer:
        words = in_words(error)
        print(words["traceback"], file=sys.stderr, flush=True)
        return RankAnswer(None, words, self.step)

    def do(
        self, method: str, args: tuple, kwargs: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Any:
        """Call a method of a backend, and return its result on rank 0.

        fetch: returns this rank's routes of a batch, the first argument.
        """
        options = {**kwargs}
        name = options.pop("backend", "")
        if fetch is not None:
            routes = fetch(self._ready(name).place)
            args = (replace(args[0], routed_experts=routes), *args[1:])
        if method not in BACKGROUND:
            self._name = name
        call = getattr(self, f"_{method}", None) or getattr(self._ready(name), method)
        value = call(*args, **options)
        return value if self.rank == 0 else None

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
        """Return how batches are cut; None: they are not."""
        return getattr(self._ready(self._name), "cutting", None)

    def _export_open(self, **options: Any) -> None:
        weights = self._ready(self._name).weights(**options)
        self._exports[self._name] = buckets(weights, BUCKET_BYTES)

    def _export_next(self) -> list[NamedTensor]:
        """Gather some 64 MB more, or nothing at the end."""
        return next(self._exports[self._name], [])

    def _send_weights(
        self, send: Callable[[Any], Any], on_all_ranks: bool = False, **options: Any
    ) -> Any:
        """Return `send`'s result or error; all ranks go through all weights."""
        weights = self._ready(self._name).weights(**options)
        found: tuple[Any, Any] = (None, None)
        if self.rank == 0 or on_all_ranks:
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
        if self._name in self._backends:
            self._backends.pop(self._name).shutdown()

    def _shutdown(self) -> None:
        for name in [*self._backends]:
            self._name = name
            self._release()


LARGE = 1 << 20
"""Bytes from which on a tensor travels beside the pickled object, without a copy."""


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
    """Return what `dumps` was given. May run any code: only for processes of the same run."""
    return pickle.loads(data[0], buffers=data[1:])


class _Pickler(cloudpickle.Pickler):
    """Ten times faster than torch's own for the small tensors of metrics."""

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


PATIENCE = timedelta(days=7)
"""Followers wait while rank 0 generates or loads data."""


class TorchrunRanks:
    """Calls the ranks that torchrun started, from rank 0."""

    places: Sequence[Place] = ()

    def __init__(self, make: Callable[[], Any], size: int, config: BaseConfig) -> None:
        self._calls, self._done, self._background = _groups(config)
        require(size == dist.get_world_size(), "parallel",
                f"must ask for the {dist.get_world_size()} processes that torchrun has started",
                size, "change a degree, or --nproc-per-node")  # fmt: skip
        self._rank, self._lock, self._usable = Rank(make, 0), threading.Lock(), True

    def call(
        self,
        method: str,
        payload: list[Any],
        phase: str,
        parts: Mapping[Coordinates, list[Any]] = {},
    ) -> RankAnswer:
        """Call all ranks, as `RayRanks.call`, but no error leaves them usable."""
        args, kwargs = loads(payload)
        if method in BACKGROUND:
            with self._lock:
                _broadcast(self._calls, (method, payload, False))
            return _in_background(self._background, self._rank, method, args, kwargs)
        with signals_held(), self._lock:
            try:
                _broadcast(self._calls, (method, payload, bool(parts)))
                fetch = partial(_own_part, self._calls, parts) if parts else None
                value = self._rank.do(method, args, kwargs, fetch)
                dist.barrier(self._done)
            except Exception:
                self._usable = False
                raise
        return RankAnswer(value, None, self._rank.step)

    def shutdown(self, timeout_s: float, result: Any = None) -> None:
        """End the others in order, with the run's result; after an error torchrun does."""
        with self._lock:  # the call of another thread ends first
            if self._usable:
                _broadcast(self._calls, ("shutdown", dumps(((), {"result": result})), False))
            self._usable = False
            self._rank.do("shutdown", (), {})


def follow(make: Callable[[], Any], config: BaseConfig) -> Any:
    """Do what rank 0's trainer does until it shuts down, and return the result of its run.

    After an error there the process ends quietly. SIGINT and SIGTERM are left to rank 0, which
    finishes its step and saves.
    """
    calls, done, background = _groups(config)
    rank = Rank(make, dist.get_rank())
    with _signals(signal.SIG_IGN):
        while True:
            method, payload, has_parts = _broadcast(calls)
            args, kwargs = loads(payload)
            if method == "shutdown":
                rank.do("shutdown", (), {})
                if kwargs["result"] is None:
                    raise SystemExit(0)
                return kwargs["result"]
            if method in BACKGROUND:
                work = (background, rank, method, args, kwargs)
                threading.Thread(target=_in_background, args=work, daemon=True).start()
                continue
            rank.do(method, args, kwargs, partial(_own_part, calls, None) if has_parts else None)
            dist.barrier(done)


def _in_background(group: dist.ProcessGroup, rank: Rank, *call: Any) -> RankAnswer:
    """Do a call in the background; the answer has the error of any rank."""
    own = rank.perform(*call)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own.error, group=group)
    return replace(own, error=next(filter(None, errors), None))


def _groups(config: BaseConfig) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of calls, of ranks that are done, and of the background."""
    seconds = max(config.runtime.timeout_s, config.runtime.start_timeout_s)
    limit = timedelta(seconds=seconds)  # a rank that hangs ends the others' collectives
    start_process_group(config.trainer.device, timeout=limit)
    times = (PATIENCE, limit, PATIENCE)
    return tuple(dist.new_group(backend="gloo", timeout=time) for time in times)


def _broadcast(group: dist.ProcessGroup, message: Any = None) -> Any:
    found = [message]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


def _own_part(
    group: dist.ProcessGroup, parts: Mapping[Coordinates, list[Any]] | None, where: Coordinates
) -> Any:
    """Have rank 0, which alone has the parts, send them; a collective call."""
    ranks, found = list[Any]([None] * dist.get_world_size()), list[Any]([None])
    dist.gather_object(where, None if parts is None else ranks, dst=0, group=group)
    sent = None if parts is None else [parts[other] for other in ranks]
    dist.scatter_object_list(found, sent, src=0, group=group)
    return loads(found[0])


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM after the block: the other ranks are in the same call."""
    held: dict[int, None] = {}
    try:
        with _signals(lambda number, frame: held.setdefault(number)):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)

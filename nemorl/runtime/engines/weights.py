"""Weights from a trainer to engines: `TrainerWeights` reads those of one step, `WeightSender`
sends them, and `check_agreement` proves that they have arrived.
"""

import itertools
import json
import math
import os
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, runtime_checkable
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.checks import require
from nemorl.data.batch import Example, collate
from nemorl.models import tensor_files
from nemorl.models.adapters import PREFIX, Adapters, live_tensors, merged_tensors
from nemorl.parallel.backend import InTurns, TrainingBackend
from nemorl.rollout.calls import blocking
from nemorl.rollout.conversation import with_last
from nemorl.rollout.generation import GenerationBackend, InFlight, SamplingParams, WeightSource
from nemorl.runtime.store.files import FailedAlone, reason_of

NamedTensor = tuple[str, Tensor]
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


@dataclass(frozen=True)
class Place:
    """A process: its node in Ray, host and id, and the GPUs that it uses."""

    node: str
    host: str
    pid: int
    gpus: tuple[str, ...]
    """As the process names them."""
    uuids: tuple[str, ...] = ()
    """Of these GPUs and those of an engine's other stages, where torch knows them."""

    @property
    def cards(self) -> frozenset[tuple[str, str]]:
        """Return a key of each GPU, unique in the cluster.

        >>> Place("node", "host", 1, ("0",)).cards == Place("node", "host", 2, ("0",)).cards
        True
        """
        named = {("uuid", each) for each in self.uuids}
        return frozenset(named or {(self.node, gpu) for gpu in self.gpus})


@dataclass(frozen=True)
class Transport:
    """A value of generation.weight_transport, and why it was taken."""

    name: str
    reason: str = ""

    @property
    def remedy(self) -> str:
        if self.name == "object_store":
            return ""
        return f" (if {self.name} fails again: set generation.weight_transport object_store)"

    def __str__(self) -> str:
        return f"new weights go {WAYS[self.name]} ({self.name}{self.reason and ': '}{self.reason})"


def choose_transport(setting: str, ranks: Sequence[Place], engines: Sequence[Place]) -> Transport:
    """Return how weights get from a trainer's ranks to engines.

    setting: generation.weight_transport. ranks: all, in order; those on a CPU beside GPUs all have
    the first GPU.

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
        needs = f"needs {NEEDS.get(setting)}"
        require(works[setting], "generation.weight_transport", needs, setting, "remove it")
        required = ", or as adapter_rank or pipeline_parallel_size requires"
        return Transport(setting, "as set" + required * (setting == "object_store"))
    name = next(name for name, can in works.items() if can)
    faster = [f"{each} needs {NEEDS[each]}" for each in [*works][: [*works].index(name)]]
    return Transport(name, ", ".join(faster) if on_gpus else "the others need GPUs")


def cards_of(places: Iterable[Place]) -> frozenset[tuple[str, str]]:
    """Return the keys of places' GPUs."""
    return frozenset().union(*(place.cards for place in places))


def own_place() -> Place:
    """Return this process's place, with its current GPU."""
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


DEVICE = "cuda"
ROUND_BYTES = 2**28
"""Sent at a time from GPU to GPU."""


class EnginesFailed(Exception):
    """Engines died, hung or raised. Its argument says why, by rank."""


def send_by_ipc(sender: Any, weights: Iterable[NamedTensor], *, opened: bool = True) -> None:
    """Send weights on this rank's GPU to engines on the same; a collective call.

    opened: whether an engine is on this GPU. Raises EnginesFailed, once all ranks are through, and
    what the weights raise, on all ranks.
    """
    client = _Client(sender)
    with _connected("cuda_ipc", sender, client) as transfer:
        transfer.client, transfer.source = client, _Source(sender.dtype, weights)
        with nullcontext() if opened else _given_back(transfer):
            transfer.send_weights()
        if client.error is not None:
            raise client.error


@contextmanager
def _given_back(transfer: Any) -> Iterator[None]:
    """Release a transfer's buffer, as an engine does that has opened it."""
    gather, found = transfer._all_gather_and_merge_handles, list[Any]()

    def gathered(handles: list[dict[str, Any]]) -> Any:
        if not found:  # all rounds of a transfer share it
            found.extend(handles[0].values())
            for *_, counter, offset, _, _ in found:
                torch.UntypedStorage._release_ipc_counter(counter, offset, device=DEVICE)
        return gather(handles)

    with patch.object(transfer, "_all_gather_and_merge_handles", gathered):
        yield


def send_by_nccl(sender: Any, weights: Iterable[NamedTensor]) -> None:
    """Broadcast weights from this GPU to engines on others, which hear before each round which
    weights it has: their order is the backend's.
    """
    with _connected("nccl", sender, sender) as transfer:
        # The update has begun, and goes on with the next round.
        transfer.client = SimpleNamespace(
            start_weight_update=lambda: None,
            update_weights=sender.update_weights,
            finish_weight_update=lambda weight_version=None: None,
        )
        sender.start_weight_update()
        for part in buckets(weights, ROUND_BYTES):
            transfer.source = _Source(sender.dtype, part)
            # vLLM packs on streams of its own, which do not wait for the one that gathers.
            torch.get_device_module(DEVICE).synchronize()
            transfer.send_weights()
            part.clear()  # or it would stay on the GPU until the next round or update
        sender.finish_weight_update()


def buckets(weights: Iterable[NamedTensor], num_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield all weights in lists of at least `num_bytes`, but for the last."""
    part, size = list[NamedTensor](), 0
    for name, tensor in weights:
        part.append((name, tensor))
        size += tensor.nbytes
        if size >= num_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


@contextmanager
def _connected(transport: str, sender: Any, client: Any) -> Iterator[Any]:
    """Yield vLLM's transfer engine, which is kept unless a transfer fails."""
    key = (transport, *sender.places.values())
    transfer = _CONNECTED.pop(key, None)
    if transfer is None:
        while _CONNECTED:
            _, old = _CONNECTED.popitem()  # its end may wait for engines that are gone
            threading.Thread(target=old.shutdown, daemon=True).start()
        transfer = _connect(transport, sender, client)
    yield transfer
    _CONNECTED[key] = transfer


_CONNECTED: dict[Any, Any] = {}


def _connect(transport: str, sender: Any, client: Any) -> Any:
    import ray
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from nemorl.runtime.workers.worker import free_port

    info: Any
    if transport == "cuda_ipc":
        rank = dist.get_rank() if dist.is_initialized() else 0
        sizes = [math.prod(shape) * sender.dtype.itemsize for shape in sender.expected.values()]
        largest = max([ROUND_BYTES, *sizes])  # every tensor has to fit in the shared buffer
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=largest)
    else:
        info = NCCLTrainerInitInfo(
            rank=0,
            world_size=1 + sender.processes * len(sender.actors),
            master_address=ray.util.get_node_ip_address(),
            master_port=free_port(),
            packed=True,
            packed_buffer_size_bytes=ROUND_BYTES // 4,
        )
    source = _Source(sender.dtype, ())
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


@dataclass
class _Client:
    """Calls engines until one fails; the ranks' collectives go on."""

    sender: Any
    error: EnginesFailed | None = None

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(self._call, method)

    def _call(self, method: str, *args: Any) -> None:
        try:
            if self.error is None:
                getattr(self.sender, method)(*args)
        except EnginesFailed as error:
            self.error = error


@dataclass
class _Source:
    """A WeightSource for vLLM."""

    dtype: torch.dtype
    weights: Iterable[NamedTensor]

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.dtype, tuple(each.shape)) for name, each in self.weights]

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self.weights:
            yield name, tensor.detach().to(DEVICE, self.dtype)


BUCKET_BYTES = 2**26
"""Sent at a time through Ray: engines load a bucket while the next one is gathered."""
WAYS_OF_GPUS = {"cuda_ipc": send_by_ipc, "nccl": send_by_nccl}
T = TypeVar("T")

Bucket = list[tuple[str, torch.dtype, tuple[int, ...], Any]]
"""Name, type, shape and bytes (a numpy array) of each tensor."""


def expected_weights(config: str | bytes) -> tuple[dict[str, tuple[int, ...]], tensor_files.Stored]:
    """Return names and shapes of the weights in files of a model, and which live tensors files have
    otherwise.

    config: its config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**json.loads(config, object_hook=_with_floats)),
            trust_remote_code=False,
        )
    stored = {**tensor_files.stored_names(model), **_one_by_one(model)}
    return tensor_files.shapes_of(dict(merged_tensors(model)), stored), stored


def _with_floats(values: dict[str, Any]) -> Any:  # as transformers writes infinity
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _one_by_one(model: Any) -> tensor_files.Stored:
    """Return the names by which vLLM's loaders take gpt-oss's experts one by one."""
    if model.config.model_type != "gpt_oss":
        return {}
    names = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
    names |= {"gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"}
    found, experts = {}, range(model.config.num_local_experts)
    for name in live_tensors(model):
        layer, _, leaf = name.rpartition(".")
        if layer.endswith(".experts") and leaf in names:
            found[name] = (tuple(f"{layer}.{i}.{names[leaf]}" for i in experts),)
    return found


def checked_weights(
    weights: Iterable[NamedTensor], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[NamedTensor]:
    """Yield the weights before the first unexpected one, and raise ValueError, after the last one,
    that lists all that do not fit.
    """
    missing, wrong = dict(expected), []
    for name, tensor in weights:
        shape, reason = missing.pop(name, None), ""
        if shape is None:
            reason = "it came twice" if name in expected else "no such parameter"
        elif shape != tuple(tensor.shape):
            reason = f"shape {tuple(tensor.shape)}, where {shape} is expected"
        if reason:
            wrong.append(f"{name!r} does not fit ({reason})")
        elif not wrong:
            yield name, tensor
    if wrong := wrong + [f"{name!r} is missing" for name in missing]:
        raise tensor_files.misfits(wrong)


@dataclass(frozen=True, kw_only=True)
class UpdateReceipt:
    """How an update ended, by the engines' ranks."""

    version: int
    failed: Mapping[int, str]
    """If any failed, all must be sent all weights again."""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """What arrived otherwise than it was sent."""
    num_weights: int = 0
    transport: Transport | None = None

    def check(self) -> None:
        """Raise WeightsDiffer, which names the first wrong engine and its weights."""
        for rank, said in self.wrong.items():
            raise tensor_files.WeightsDiffer(
                f"replica {rank} must get the trainer's weights of version {self.version}, but it"
                f" did not: {said}; resume the run from its last checkpoint, and report this"
            )


@dataclass(kw_only=True)
class WeightSender:
    """Gives engines weights; may be pickled and called by all ranks of a trainer."""

    actors: Mapping[int, Any]
    sealed: bytes = b""
    """The pickled actors, which rank 0 alone can read, as it alone has a part in Ray."""
    places: Mapping[int, Place]
    expected: Mapping[str, tuple[int, ...]]
    stored: tensor_files.Stored = field(default_factory=dict)
    """Live tensors that files have otherwise."""
    dtype: torch.dtype
    """The engines'."""
    transport: str = "auto"
    processes: int = 1
    timeout_s: float = 300.0
    version: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """Why engines failed, also where the trainer's end of a transfer hangs."""
    arrived: dict[int, list[list[tuple[str, int]]]] = field(default_factory=dict)

    def __call__(self, version: int, weights: Iterable[NamedTensor]) -> UpdateReceipt:
        """Return how it went, by checksums of what was sent and what arrived. Raises ValueError for
        weights of another model.
        """
        self = replace(self, version=version, arrived={})
        ranks = [own_place()] * (dist.get_world_size() if dist.is_initialized() else 1)
        if several := len(ranks) > 1:
            dist.all_gather_object(ranks, ranks[0])
        places = list(self.places.values())
        transport = choose_transport(self.transport, ranks, places)
        sends = not several or dist.get_rank() == 0
        if sends and self.sealed:
            self = replace(self, actors=pickle.loads(self.sealed), sealed=b"")
        if not sends and transport.name != "cuda_ipc":
            return UpdateReceipt(version=version, failed={}, transport=transport)
        sent: dict[str, Tensor] = {}
        adapters: dict[str, Tensor] = {}
        base = _without_adapters(tensor_files.as_stored(weights, self.stored), adapters)
        first = list(itertools.islice(base, 1))
        has_base = bool(adapters) and not first  # the engines have the base
        checked = checked_weights(itertools.chain(first, base), self.expected)
        checked = self._noted(checked, sent) if sends else checked
        options = {}
        if transport.name == "cuda_ipc" and several:
            options["opened"] = bool(ranks[dist.get_rank()].cards & cards_of(places))
        try:
            if transport.name in WAYS_OF_GPUS:
                self._send_on_gpus(checked, weights, transport, **options)
            else:
                self._send_buckets(None if has_base else checked, adapters, sent)
        except EnginesFailed as error:
            failed = {rank: f"{why}{transport.remedy}" for rank, why in error.args[0].items()}
            return UpdateReceipt(version=version, failed=failed, transport=transport)
        return replace(self._receipt(sent), transport=transport)

    def __getstate__(self) -> dict[str, Any]:
        sealed = self.sealed or cloudpickle.dumps(self.actors)
        return {**vars(self), "actors": {}, "sealed": sealed}

    def _send_on_gpus(
        self,
        checked: Iterator[NamedTensor],
        weights: Iterable[NamedTensor],
        transport: Transport,
        **options: bool,
    ) -> None:
        """options: of `send_by_ipc`, if all ranks send, which raises FailedAlone."""
        send: Callable[[], Any] = partial(WAYS_OF_GPUS[transport.name], self, checked, **options)
        if not options:
            done = started(send, current_device())
            if not wait([done], self.timeout_s).done:
                why = [f"; replica {rank} failed: {said}" for rank, said in self.failed.items()]
                raise TimeoutError(
                    f"the weights were not through within {self.timeout_s:g} s"
                    " (generation.timeout_s): where a network hangs, set"
                    f" generation.weight_transport object_store{''.join(why)}"
                )
            send = done.result
        try:
            send()
        except (EnginesFailed, ValueError):
            raise
        except Exception as error:
            kind = FailedAlone if options else RuntimeError
            raise kind(f"{type(error).__name__}: {error}{transport.remedy}") from error
        finally:
            if options and isinstance(weights, Generator):
                weights.close()

    def _noted(
        self, weights: Iterable[NamedTensor], sent: dict[str, Tensor]
    ) -> Iterator[NamedTensor]:
        for name, tensor in weights:
            cast = tensor.detach().to(self.dtype if tensor.is_floating_point() else tensor.dtype)
            sent[name] = tensor_files.tensor_checksum(cast)
            yield name, cast

    def _receipt(self, sent: Mapping[str, Tensor]) -> UpdateReceipt:
        sums = [each.to(next(iter(sent.values())).device) for each in sent.values()]
        expected = dict(zip(sent, torch.stack(sums).tolist() if sums else (), strict=True))
        wrong = {}
        for rank in self.actors:
            for worker in self.arrived.get(rank) or [[]]:
                if said := _otherwise(expected, worker):
                    wrong[rank] = said
        return UpdateReceipt(version=self.version, failed={}, wrong=wrong, num_weights=len(sent))

    def start(self, method: str, *args: Any) -> dict[int, Any]:
        return {rank: one.call.remote(method, *args) for rank, one in self.actors.items()}

    def wait(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """Return the calls' results by rank. Raises EnginesFailed."""
        import ray

        ready, _ = ray.wait([*calls.values()], num_returns=len(calls), timeout=self.timeout_s)
        results, reasons = dict[int, Any](), dict[int, str]()
        for rank, call in calls.items():
            try:
                if call in ready:
                    results[rank] = ray.get(call)
                    continue
                limit = f"{self.timeout_s:g} s (generation.timeout_s)"
                reasons[rank] = f"it had not taken all new weights after {limit}: raise it"
            except ray.exceptions.RayTaskError as error:
                reasons[rank] = f"{type(error.cause).__name__}: {error.cause}"
            except ray.exceptions.RayError as error:
                reasons[rank] = reason_of(str(error))
        if reasons:
            self.failed.update(reasons)
            raise EnginesFailed(reasons)
        return results

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        calls = {}
        for index, (rank, actor) in enumerate(self.actors.items()):
            message = {"backend": "ipc", "info": info}
            if "rank_offset" in info:
                offset = info["rank_offset"] + index * self.processes
                message = {"backend": "nccl", "info": {**info, "rank_offset": offset}}
            calls[rank] = actor.call.remote("connect", message)
        self.wait(calls)

    def start_weight_update(self) -> None:
        self.wait(self.start("begin_weights"))

    def update_weights(self, info: Any) -> None:
        self.wait(self.start("load_weights", info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.arrived.update(self.wait(self.start("finish_weights", self.version)))

    def _send_buckets(
        self,
        weights: Iterator[NamedTensor] | None,
        adapters: Mapping[str, Tensor],
        sent: dict[str, Tensor],
    ) -> None:
        """Through Ray's object store, which engines on this machine map."""
        import ray

        calls: dict[int, Any] = {}
        try:
            for part in buckets(weights or (), BUCKET_BYTES):
                calls = calls or self.start("begin_weights")
                stored = ray.put({"bucket": _packed(part)})
                waiting, calls = calls, {}
                self.wait(waiting)
                calls = self.start("load_weights", stored)
        finally:  # none may come after the begin of another update
            self.wait(calls)
        held = _packed(self._noted(adapters.items(), sent))
        calls = self.start("finish_weights", self.version, *([ray.put(held)] if held else ()))
        self.arrived.update(self.wait(calls))


def _otherwise(sent: Mapping[str, int], arrived: Sequence[tuple[str, int]]) -> str:
    found, counts = dict(arrived), Counter(name for name, _ in arrived)
    wrong = [f"{name!r} was not sent" for name in found if name not in sent]
    for name, number in sent.items():
        if (times := counts[name]) != 1:
            wrong.append(f"{name!r} {f'arrived {times} times' if times else 'did not arrive'}")
        elif found[name] != number:
            wrong.append(f"{name!r} arrived with other numbers")
    return ", ".join(wrong[:5]) + f" and {len(wrong) - 5} more" * (len(wrong) > 5)


def _without_adapters(
    weights: Iterable[NamedTensor], adapters: dict[str, Tensor]
) -> Iterator[NamedTensor]:
    for name, tensor in weights:
        if name.startswith(PREFIX):
            adapters[name] = tensor.detach().to("cpu", copy=True)
        else:
            yield name, tensor


def _packed(weights: Iterable[NamedTensor]) -> Bucket:
    def in_bytes(tensor: Tensor) -> Any:
        return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()

    return [(name, each.dtype, tuple(each.shape), in_bytes(each)) for name, each in weights]


def unpacked(bucket: Bucket) -> Iterator[NamedTensor]:
    """Yield a bucket's tensors, which must not be written to."""
    for name, dtype, shape, data in bucket:
        yield name, torch.from_numpy(data).view(dtype).view(shape)


def current_device() -> int | str | None:
    """Return the current GPU, if any."""
    module = torch.get_device_module(DEVICE)
    return module.current_device() if module.is_available() else None


def started(function: Callable[[], T], device: int | str | None) -> Future[T]:
    """Run a function in a thread of its own."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # who awaits it may be cancelled; the thread goes on

    def run() -> None:
        try:
            if device is not None:
                torch.get_device_module(DEVICE).set_device(device)
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


AGREEMENT = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of log-probabilities by rounding, by the generator's precision."""


@runtime_checkable
class HasWeights(Protocol):
    """What is read of any trainer."""

    @property
    def step(self) -> int: ...

    def weights(self) -> Iterator[NamedTensor]: ...


class TrainerWeights(WeightSource):
    """The weights of a trainer after its last step; their version is its `step`.

    `send` and the methods of a trainer that is `InTurns` wait for each other; of another trainer,
    `send` must not meet a step. The iterator of `newest` raises RuntimeError if a step comes
    between.
    """

    def __init__(self, trainer: HasWeights) -> None:
        self.trainer = trainer
        self._turn: Any = trainer.turn if isinstance(trainer, InTurns) else nullcontext()

    def newest(self) -> tuple[int, Iterator[NamedTensor]]:
        with self._turn:
            return self.trainer.step, self._unchanged(self.trainer.step)

    def send(
        self,
        use: Callable[[int, Iterator[NamedTensor]], T],
        *,
        dtype: torch.dtype | None = None,
        adapters: Adapters = "merged",
    ) -> T:
        options: Any = {} if adapters == "merged" else {"adapters": adapters}
        with self._turn:
            version = self.trainer.step
            send = getattr(self.trainer, "send_weights", None)
            if send is not None:  # the weights are in other processes
                if isinstance(use, WeightSender):
                    options["on_all_ranks"] = True
                return send(partial(use, version), dtype=dtype, **options)
            return use(version, iter(self.trainer.weights(**options)))  # perhaps on another thread

    def _unchanged(self, version: int) -> Iterator[NamedTensor]:
        weights: Iterator[NamedTensor] | None = None
        while True:
            with self._turn:
                if self.trainer.step != version:
                    raise RuntimeError(
                        "weights must be read between two steps, but the trainer went from step"
                        f" {version} to step {self.trainer.step}: read the newest ones"
                    )
                weights = weights or iter(self.trainer.weights())
                found = next(weights, None)
            if found is None:
                return
            yield found


def sync_weights(
    trainer: HasWeights, generator: GenerationBackend, *, in_flight: InFlight = "keep"
) -> None:
    """Give the generator the trainer's newest weights, unless it has them. Blocks, also where an
    event loop runs. After an error nothing can be generated until an update succeeds.
    """
    if generator.policy_version != trainer.step:
        options: Any = {} if in_flight == "keep" else {"in_flight": in_flight}
        blocking(generator.update_weights(TrainerWeights(trainer), **options))


def check_agreement(
    trainer: TrainingBackend,
    generator: GenerationBackend,
    prompt: Sequence[int],
    *,
    precision: str,
    num_tokens: int = 8,
) -> float:
    """Return the largest difference between the trainer's and the generator's log-probabilities of
    a greedy answer's tokens. The generator sleeps from then on.

    Raises RuntimeError where it is more than rounding.
    """
    greedy = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, seed=0)
    answer = generator.generate([prompt], greedy)[0]
    generator.sleep()  # the trainer needs its memory
    tokens = [*prompt, *answer.token_ids]
    mask = [False] * len(prompt) + [True] * len(answer.token_ids)
    experts = with_last(answer.routed_experts)
    example = Example(input_ids=tokens, loss_mask=mask, response_mask=mask, routed_experts=experts)
    ours = trainer.get_logprobs(collate([example])).values[0, len(prompt) :].cpu()
    worst = float((ours - torch.tensor(answer.logprobs)).abs().max())
    if not worst <= AGREEMENT[precision]:
        raise RuntimeError(
            "trainer and generator must give a token the same log-probability, but they differ by"
            f" {worst:.6f}, where {AGREEMENT[precision]} would be rounding: give the generator the"
            " same model, and sync its weights"
        )
    return worst

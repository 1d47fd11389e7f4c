"""Several ranks send weights to engines on their GPUs by vLLM's own IPC engines, with gloo and
shared files in the place of CUDA.
"""

import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.parallel.config import BackendConfig
from nemorl.runtime.engines import weights as module
from nemorl.runtime.engines.weights import EnginesFailed, Place, WeightSender
from nemorl.runtime.ranks.rank import Rank
from tests.ranks import run_ranks

REMEDY = " (if cuda_ipc fails again: set generation.weight_transport object_store)"
SHAPES = {f"layers.{i}.{name}": (4 + i, 40) for i in range(6) for name in "ab"}


class Backend:
    """All ranks gather its weights, and add their numbers."""

    def __init__(self) -> None:
        self.step, self.version, self.yielded = 0, 0, 0

    def setup(self, config: Any) -> None: ...

    def weights(self, dtype: torch.dtype = torch.float32) -> Any:
        self.yielded = 0
        for index, (name, shape) in enumerate(reversed(SHAPES.items())):
            tensor = torch.full(shape, 100.0 * self.version + index)
            dist.all_reduce(tensor, dist.ReduceOp.MAX)  # whoever stays away stops all
            self.yielded += 1
            yield name, (tensor + 1000 * dist.get_rank()).to(dtype)

    def shutdown(self) -> None: ...


class Engine:
    """vLLM's worker end, on a GPU."""

    def __init__(self, gpu: int, device: str = "cpu") -> None:
        self.place, self.calls, self.fails = torch.device(device, gpu), list[str](), ""
        self.received: dict[str, Tensor] = {}
        self.call = SimpleNamespace(remote=self.done)

    def done(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        try:
            if method == self.fails:
                raise RuntimeError(f"{method} failed")
            return getattr(self, method, dict)(*args)
        except Exception as error:
            return error

    def connect(self, message: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        model = SimpleNamespace(load_weights=self.received.update)
        settings = SimpleNamespace(parallel_config=None, model_config=None)
        self.inner = IPCWeightTransferEngine(SimpleNamespace(), settings, self.place, model)
        self.inner.init_transfer_engine(self.inner.parse_init_info(message["info"]))

    def load_weights(self, info: dict[str, Any]) -> None:
        self.inner.receive_weights(self.inner.parse_update_info(info))

    def finish_weights(self, *_: Any) -> dict[str, Any]:
        self.inner.shutdown()
        return {}


def waited(sender: WeightSender, calls: dict[int, Any]) -> dict[int, Any]:
    failed = {rank: str(call) for rank, call in calls.items() if isinstance(call, Exception)}
    if failed:
        raise EnginesFailed(failed)
    return calls


class Shared:
    """torch, whose GPU memory is a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, **_: Any) -> Tensor:
        self.file = str(self.folder / f"rank-{dist.get_rank()}")
        return torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8)

    def handle(self, tensor: Tensor) -> tuple[None, tuple[Any, ...]]:
        """Share it, with one user more."""
        count(self.file, 1)
        return None, (self.file, len(tensor), *[0] * 9, self.file.encode(), -1, None, None)


def opened(file: str, size: int, *_: Any) -> Tensor:
    found = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    weakref.finalize(found, count, file, -1)
    return found


def count(file: str | bytes, number: int, **_: Any) -> None:
    """Note one user more, or one less, of a rank's memory."""
    with Path(f"{os.fsdecode(file)}-users").open("a") as users:
        print(number, file=users)


def without_gpus(folder: Path) -> Any:
    """Patches of this process's CUDA, in which a rank's GPU has its number."""
    from contextlib import ExitStack

    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import packed_tensor

    rank, shared, stack = dist.get_rank(), Shared(folder), ExitStack()
    done = SimpleNamespace(synchronize=lambda: None)
    for target, name, value in [
        (torch.accelerator, "current_device_index", lambda: rank),
        (torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"gpu-{gpu}")),
        (torch.cuda, "current_stream", lambda: done),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "ipc_collect", lambda: None),
        (packed_tensor, "torch", shared),
        (packed_tensor, "reduce_tensor", shared.handle),
        (torch.UntypedStorage, "_release_ipc_counter", count),
        (reductions, "rebuild_cuda_tensor", opened),
        (module, "DEVICE", "cpu"),
        (module, "ROUND_BYTES", 4096),
        (module, "_CONNECTED", {}),
        (WeightSender, "wait", waited),
        (module, "own_place", lambda: Place("node", "host", os.getpid(), (str(rank),))),
    ]:
        stack.enter_context(patch.object(target, name, value))
    return stack


def updates(folder: Path) -> list[Any]:
    """What two ranks and engines do in updates, of which the first and last are good."""
    rank = dist.get_rank()
    host = Rank(Backend, rank)
    host.do("setup", (BackendConfig(),), {})
    backend = host._backends[""].inner
    engines = {number: Engine(number) for number in range(2)}
    found: list[Any] = []

    def send(version: int, expected: Any = SHAPES, fails: str = "") -> None:
        places = {number: Place("node", "host", 1, (str(number),)) for number in engines}
        sender = WeightSender(actors=engines, places=places, expected=expected, dtype=torch.float32)
        backend.version, engines[1].fails = version, fails
        answer = host.do("send_weights", (lambda w: sender(version, w),), {"on_all_ranks": True})
        values = {number: one.received.copy() for number, one in engines.items()}
        calls = [one.calls.copy() for one in engines.values()]
        found.append((answer, values, calls, backend.yielded))
        for one in engines.values():
            one.received.clear()
            one.calls.clear()

    with without_gpus(folder):
        send(1)
        for method in ("connect", "begin_weights", "load_weights", "finish_weights"):
            module._CONNECTED.clear()
            send(2, fails=method)
        send(3, expected={**SHAPES, "layers.0.a": (9, 9)})
        send(4)
    return found


def lonely(folder: Path) -> list[list[list[int]]]:
    """Who has used each rank's memory after three updates of two ranks, and an engine on the GPU
    of one.
    """
    found = []
    for rank in range(2):
        engine = Engine(rank)
        sender = WeightSender(
            actors={0: engine},
            places={0: Place("node", "host", 1, (str(rank),))},
            expected=SHAPES,
            dtype=torch.float32,
        )
        backend, own = Backend(), folder / str(rank)
        with without_gpus(own):
            for version in range(3):
                backend.version = version
                sender(version, backend.weights())
                assert engine.calls.count("finish_weights") == (version + 1) * (1 - dist.get_rank())
        dist.barrier()
        files = sorted(own.glob("*-users"))
        found.append([[int(line) for line in file.read_text().split()] for file in files])
    return found


@pytest.mark.slow
def test_no_rank_keeps_what_it_has_shared(tmp_path: Path):
    """Also where no engine is on its GPU, and so none gives it back: each sync took a buffer."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    for found in run_ranks(2, lonely, tmp_path):
        assert found == [[[1, -1] * 3] * 2] * 2


@pytest.mark.slow
def test_each_engine_gets_the_weights_of_the_rank_on_its_gpu(tmp_path: Path):
    ranks = run_ranks(2, updates, tmp_path)
    good, *failing, misfit, last = ranks[0]
    for (answer, values, calls, _), version in ((good, 1), (last, 4)):
        receipt, error = answer
        assert error is None and receipt.failed == {} and receipt.version == version
        assert receipt.transport.name == "cuda_ipc"
        for gpu, received in values.items():
            assert received.keys() == SHAPES.keys()
            for index, (name, shape) in enumerate(reversed(SHAPES.items())):
                expected = torch.full(shape, 100.0 * version + index + 1000 * gpu)
                assert torch.equal(received[name], expected)
        assert calls[0] == calls[1] and calls[0].count("load_weights") > 2
    for (answer, _, calls, yielded), method in zip(
        failing, ("connect", "begin_weights", "load_weights", "finish_weights"), strict=True
    ):
        receipt, error = answer
        assert error is None and receipt.failed == {1: f"{method} failed{REMEDY}"}
        assert calls[1][-1] == method, "nothing after it is asked of engines"
        assert yielded == len(SHAPES), "the ranks go on to the end"
    assert "'layers.0.a' does not fit" in misfit[0][1]["message"]
    # The other rank has gone through as many weights, and has no say.
    assert [(answer, yielded) for answer, _, _, yielded in ranks[1]] == [
        (None, yielded) for *_, yielded in ranks[0]
    ]


@pytest.mark.slow
def test_a_rank_gets_its_buffer_back_after_each_update():
    """vLLM's engine holds it until the next one, which for a large embedding is gigabytes."""
    from nemorl.runtime.engines.receiver import Receiver

    for backend, closed in (("ipc", 1), ("nccl", 0)):
        shut: list[str] = []
        receiver = object.__new__(Receiver)
        receiver.model, receiver.model_config = torch.nn.Module(), None
        receiver.inner = SimpleNamespace(shutdown=lambda shut=shut: shut.append("down"))
        receiver.backend = backend
        receiver.finish_weight_update()
        assert len(shut) == closed

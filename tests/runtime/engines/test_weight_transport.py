"""The ways that weights go, to receivers that are processes of their own: they must get what was
sent, whatever happens to the others.
"""

import contextlib
import gc
import os
import signal
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from nemorl.runtime.engines.weight_buckets import WeightMismatch
from nemorl.runtime.engines.weight_packers import ObjectPacker, SharedPacker
from nemorl.runtime.engines.weight_transport import (
    Fleet,
    LocalReceiver,
    WeightSender,
    choose_transport,
)

SHAPES = {
    "embed": (7, 11),
    **{f"layers.{i}.{part}": (13, 16) for i in range(6) for part in ("a", "b", "c")},
    "norm": (5,),
}
MEBI = 2**20


def weights_of(shapes, seed):
    """Made as they are asked for, as merged adapters are."""
    for number, (name, shape) in enumerate(shapes.items()):
        yield name, torch.rand(shape, generator=torch.Generator().manual_seed(1000 * seed + number))


class Store:
    """An engine that only remembers the sum of each tensor, and what was asked of it.

    `behaviour`: what it does with its second bucket.
    """

    def __init__(self, behaviour=""):
        self.behaviour, self.calls, self.sums, self.dtypes, self.done = (
            behaviour,
            [],
            {},
            set(),
            False,
        )

    def begin_weights(self):
        self.calls, self.sums, self.dtypes, self.done = ["begin"], {}, set(), False

    def load_weights(self, payload):
        self.calls.append("load")
        if self.calls.count("load") == 2:
            if self.behaviour == "raise":
                raise RuntimeError("out of memory")
            if self.behaviour == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.behaviour == "hang":
                time.sleep(1000)
        if self.behaviour == "slow":
            time.sleep(0.02)
        for name, tensor in payload.tensors():
            self.sums[name] = tensor.double().sum().item()
            self.dtypes.add(tensor.dtype)

    def finish_weights(self):
        self.calls.append("finish")
        self.done = True

    def state(self):
        return self.calls, self.sums, self.dtypes, self.done

    def peak_memory(self):
        return peak_memory()

    def mappings(self):
        return Path("/proc/self/maps").read_text().count("nemorl-weights")


def peak_memory():
    """Bytes that this process had at most since this was last asked, of its own and mapped."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(status["VmHWM"].split()[0]) * 1024


def serve(pipe, behaviour):
    torch.set_num_threads(1)
    store = Store(behaviour)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send((getattr(store, method)(*args), None))
        except Exception as error:
            pipe.send((None, error))


class ProcessReceiver:
    """Answers come in the order of the calls."""

    def __init__(self, behaviour=""):
        self.pipe, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(
            target=serve, args=(theirs, behaviour), daemon=True
        )
        self.process.start()
        theirs.close()
        self.answers, self.started = [], 0

    def start(self, method, *args):
        with contextlib.suppress(OSError):  # who is dead says so when it is waited for
            self.pipe.send((method, args))
        self.started += 1
        return Call(self, self.started)

    def call(self, method, *args):
        return self.start(method, *args).result(30)

    def stop(self):
        self.process.kill()
        self.process.join()


class Call:
    def __init__(self, receiver, number):
        self.receiver, self.number = receiver, number

    def result(self, timeout_s=None):
        deadline = time.monotonic() + timeout_s
        while len(self.receiver.answers) < self.number:
            if not self.receiver.pipe.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
            try:
                self.receiver.answers.append(self.receiver.pipe.recv())
            except (EOFError, ConnectionError):
                raise RuntimeError("the process is gone") from None
        value, error = self.receiver.answers[self.number - 1]
        if error is not None:
            raise error
        return value


@pytest.fixture(scope="module")
def plain():
    receivers = [ProcessReceiver(), ProcessReceiver("slow")]
    yield receivers
    for receiver in receivers:
        receiver.stop()


@contextlib.contextmanager
def started(*behaviours):
    receivers = [ProcessReceiver(behaviour) for behaviour in behaviours]
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.stop()


def sums(shapes, seed, dtype=torch.float32):
    return {
        name: tensor.to(dtype).double().sum().item() for name, tensor in weights_of(shapes, seed)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 5000, 10**6])
def test_processes_get_what_was_sent_again_and_again(plain, bucket_bytes, dtype):
    """A slow one, too: no bucket may be overwritten before all have read it."""
    sender = WeightSender(SHAPES, dtype=dtype, transport="shared_memory", bucket_bytes=bucket_bytes)
    for seed in range(3):
        assert sender.send(weights_of(SHAPES, seed), plain) == {}
        for receiver in plain:
            calls, got, dtypes, done = receiver.call("state")
            assert (got, dtypes, done) == (sums(SHAPES, seed, dtype), {dtype}, True)
            loads = {1: len(SHAPES), 10**6: 1}.get(bucket_bytes, len(calls) - 2)
            assert calls == ["begin", *["load"] * loads, "finish"]


def test_an_engine_in_this_process_gets_the_trainers_own_tensors():
    class Keeper(Store):
        def load_weights(self, payload):
            super().load_weights(payload)
            self.weights = [*getattr(self, "weights", []), *payload.tensors()]

    keeper, weights = Keeper(), list(weights_of(SHAPES, 0))
    assert (
        WeightSender(SHAPES, dtype=torch.float32, transport="direct", bucket_bytes=3000).send(
            weights, [LocalReceiver(keeper)]
        )
        == {}
    )
    assert [(name, tensor.data_ptr()) for name, tensor in keeper.weights] == [
        (name, tensor.data_ptr()) for name, tensor in weights
    ]
    assert keeper.calls.count("load") > 3


def test_whatever_happens_to_some_the_others_get_everything(plain):
    with started("raise", "die", "hang") as broken:
        for receiver in broken:
            receiver.call("state")  # so that all have started
        receivers = [plain[0], *broken, plain[1]]
        sender = WeightSender(
            SHAPES, dtype=torch.float32, transport="shared_memory", bucket_bytes=3000, timeout_s=1.5
        )
        failed = sender.send(weights_of(SHAPES, 1), receivers)
        assert {index: type(error) for index, error in failed.items()} == {
            1: RuntimeError,
            2: RuntimeError,
            3: TimeoutError,
        }
        assert (str(failed[1]), str(failed[2])) == ("out of memory", "the process is gone")
        for index in (0, 4):
            assert receivers[index].call("state")[1:] == (sums(SHAPES, 1), {torch.float32}, True)
        assert receivers[1].call("state")[3] is False
        assert sender.send(weights_of(SHAPES, 2), [receivers[0]]) == {}
        assert receivers[0].call("state")[1] == sums(SHAPES, 2)


class Recorder:
    """What was called, and what was waited for. The last bucket can't be loaded."""

    def __init__(self):
        self.events = []

    def start(self, method, *args):
        self.events.append(method)
        number = len(self.events)
        return type("Call", (), {"result": lambda _, timeout_s: self.answer(number)})()

    def answer(self, number):
        self.events.append(f"waited for {number}")
        if number == 6:
            raise RuntimeError("too large")


def test_every_bucket_is_waited_for_before_the_end_and_after_an_error():
    shapes, weights = (
        {"a": (16,), "b": (16,), "c": (16,)},
        [(name, torch.zeros(16)) for name in "abc"],
    )
    expected = [
        "begin_weights",
        "waited for 1",
        "load_weights",
        "load_weights",
        "waited for 3",
        "load_weights",
        "waited for 4",
        "waited for 6",
    ]
    recorder, sender = (
        Recorder(),
        WeightSender(shapes, dtype=torch.float32, transport="shared_memory", bucket_bytes=64),
    )
    assert [str(error) for error in sender.send(weights, [recorder]).values()] == ["too large"]
    assert recorder.events == expected  # and it is not asked to finish
    recorder = Recorder()
    with pytest.raises(WeightMismatch):
        sender.send([*weights, weights[0]], [recorder])
    assert recorder.events[:5] == expected[:5]
    assert recorder.events[-1] == "waited for 4"


def test_who_has_failed_is_not_waited_for_again():
    class Silent:
        waits = 0

        def start(self, method, *args):
            return self

        def result(self, timeout_s=None):
            self.waits += 1
            raise TimeoutError("no answer")

    silent = Silent()
    fleet = Fleet([silent], timeout_s=0.1)
    calls = [fleet.start("load_weights"), fleet.start("load_weights")]
    for call in calls:
        fleet.gather(call)
    assert silent.waits == 1 and list(fleet.failed) == [0]


@pytest.mark.parametrize("when", [0, 10])
def test_an_error_at_the_trainers_leaves_the_receivers_without_an_end(plain, when):
    def broken():
        for number, item in enumerate(weights_of(SHAPES, 3)):
            if number == when:
                raise FloatingPointError("merging failed")
            yield item

    sender = WeightSender(SHAPES, dtype=torch.float32, transport="shared_memory", bucket_bytes=2000)
    assert sender.send(weights_of(SHAPES, 2), plain) == {}
    with pytest.raises(FloatingPointError, match="merging failed"):
        sender.send(broken(), plain)
    for receiver in plain:
        assert receiver.call("state")[3] is (
            when == 0
        )  # before the first bucket none is asked to begin
    assert sender.send(weights_of(SHAPES, 4), plain) == {}
    assert [receiver.call("state")[1] for receiver in plain] == [sums(SHAPES, 4)] * 2


def test_weights_that_do_not_fit_are_refused_before_anybody_begins(plain):
    sender = WeightSender(
        {**SHAPES, "embed": (1, 1)},
        dtype=torch.float32,
        transport="shared_memory",
        bucket_bytes=2000,
    )
    with pytest.raises(
        WeightMismatch,
        match=r"'embed' does not fit \(shape \(7, 11\), where \(1, 1\) is expected\)",
    ):
        sender.send(weights_of(SHAPES, 5), plain)
    assert all(receiver.call("state")[3] for receiver in plain)


def test_neither_side_ever_holds_more_than_two_buckets(plain):
    """A model of 192 MiB whose tensors of 1.5 are made one by one, as merged adapters are, in
    buckets of 24.
    """
    shapes = {f"layers.{i // 4}.{i % 4}": (384, 1024) for i in range(128)}
    bound = (2 * 24 + 16) * MEBI  # with what the allocator keeps of tensors that are gone
    sender = WeightSender(
        shapes, dtype=torch.float32, transport="shared_memory", bucket_bytes=24 * MEBI
    )
    # Whatever is loaded at the first use is loaded now.
    assert (
        WeightSender(SHAPES, dtype=torch.float32, transport="shared_memory").send(
            weights_of(SHAPES, 6), plain
        )
        == {}
    )
    gc.collect()
    starts = [
        call("peak_memory") and call("peak_memory")
        for call in (lambda _: peak_memory(), *(receiver.call for receiver in plain))
    ]
    assert sender.send(weights_of(shapes, 6), plain) == {}
    assert peak_memory() - starts[0] < bound
    for receiver, start in zip(plain, starts[1:], strict=True):
        assert receiver.call("peak_memory") - start < bound


def test_nothing_is_left_behind(plain):
    def files():
        """Of ours alone: what else is open may be closed at any moment, by whatever has become
        garbage.
        """
        opened = [
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        return sum("memfd:nemorl" in name for name in opened), sorted(
            path.name for path in Path("/dev/shm").iterdir() if "nemorl" in path.name
        )

    gc.collect()
    before = files()
    for seed in range(3):
        sender = WeightSender(
            SHAPES, dtype=torch.float32, transport="shared_memory", bucket_bytes=2000
        )
        assert sender.send(weights_of(SHAPES, seed), plain) == {}
        assert files()[0] > before[0]
        sender.close()
        assert files() == before
    assert sender.send(weights_of(SHAPES, 7), plain) == {}  # a closed one can be used again
    assert [receiver.call("mappings") for receiver in plain] == [2, 2]
    assert plain[0].call("state")[1] == sums(SHAPES, 7)


def test_memory_that_is_not_the_trainers_is_an_error_that_names_the_way_out(plain):
    packer = SharedPacker(100)
    packer.add("a", torch.ones(3), torch.float32)
    for wrong in ({"file": 10**6}, {"inode": 1}):
        with pytest.raises(RuntimeError, match=r"set generation.weight_transport object_store"):
            plain[0].call("load_weights", replace(packer.payload(), **wrong))


@pytest.mark.xdist_group("ray")
def test_workers_on_a_cluster_get_them_through_its_object_store():
    """The calls of two rounds, with a type that NumPy has no name for; a worker that dies is told
    from the others here, too.
    """
    pytest.importorskip("ray")
    from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster
    from nemorl.runtime.cluster.workers import RayWorkerGroup
    from nemorl.runtime.engines.replica import Life
    from tests.ray_session import ray_cpus

    ray_cpus()
    with RayVirtualCluster({"engines": [Bundle(cpus=1)] * 2}) as cluster:
        group = RayWorkerGroup(
            cluster.placement("engines"), "tests.runtime.engines.test_weight_transport:Store"
        )
        try:
            lives = [Life(group, rank) for rank in range(2)]
            for dtype in (torch.float32, torch.bfloat16):
                sender = WeightSender(
                    SHAPES, dtype=dtype, transport="object_store", bucket_bytes=2000, timeout_s=60
                )
                for seed in range(2):
                    assert sender.send(weights_of(SHAPES, seed), lives) == {}
                    for calls, *state in group.run_all("state"):
                        assert state == [sums(SHAPES, seed, dtype), {dtype}, True]
                        assert calls.count("load") > 2
            group.kill(1)
            failed = sender.send(weights_of(SHAPES, 2), lives)
            assert {index: type(error).__name__ for index, error in failed.items()} == {
                1: "WorkerDied"
            }
            assert group.call(0, "state").result(60)[1] == sums(SHAPES, 2, torch.bfloat16)
        finally:
            group.shutdown()


@pytest.mark.xdist_group("ray")
def test_the_further_processes_of_an_engine_map_what_came_through_the_object_store(plain):
    pytest.importorskip("ray")
    from tests.ray_session import ray_cpus

    ray_cpus()
    packer = ObjectPacker()
    for name, tensor in weights_of(SHAPES, 8):
        packer.add(name, tensor, torch.bfloat16)
    plain[0].call("begin_weights")
    plain[0].call("load_weights", packer.payload().nearby())
    assert plain[0].call("state")[1:3] == (sums(SHAPES, 8, torch.bfloat16), {torch.bfloat16})


@pytest.mark.parametrize(
    ("setting", "where", "chosen"),
    [
        ("auto", {"cuda": False, "same_machine": True}, "shared_memory"),
        ("auto", {"cuda": False, "same_machine": False}, "object_store"),
        ("auto", {"cuda": True, "same_machine": True, "one_gpu": True}, "cuda_ipc"),
        ("auto", {"cuda": True, "same_machine": False, "separate_gpus": True}, "nccl"),
        (
            "auto",
            {"cuda": True, "same_machine": True},
            "shared_memory",
        ),  # some share the trainer's GPU and some don't
        ("object_store", {"cuda": True, "same_machine": True, "one_gpu": True}, "object_store"),
        (
            "shared_memory",
            {"cuda": False, "same_machine": False},
            "every engine on the trainer's machine",
        ),
        (
            "cuda_ipc",
            {"cuda": False, "same_machine": True},
            "every engine on the trainer's own GPU",
        ),
        (
            "nccl",
            {"cuda": True, "same_machine": True, "one_gpu": True},
            "engines on GPUs of their own",
        ),
    ],
)
def test_which_way(setting, where, chosen):
    if " " in chosen:
        with pytest.raises(
            ValueError, match=f"generation.weight_transport needs {chosen}.*, but it is '{setting}'"
        ):
            choose_transport(setting, **where)
    else:
        assert choose_transport(setting, **where) == chosen


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ways_between_gpus_need_one(transport):
    store = Store()
    with pytest.raises(
        ValueError,
        match=f"shared_memory or object_store where there is no GPU, but it is '{transport}'",
    ):
        WeightSender(SHAPES, dtype=torch.float32, transport=transport).send(
            weights_of(SHAPES, 0), [LocalReceiver(store)]
        )
    assert store.calls == []

"""Weights on their way: names and shapes, transports, and engines that are the trainer's model."""

import json
import re
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
import ray
import torch
from transformers import CONFIG_MAPPING

from nemorl.models.adapters import merged_tensors
from nemorl.models.tensor_files import as_stored
from nemorl.models.tiny import tiny_config
from nemorl.models.tiny import tiny_model as tiny_of
from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.engines import weights as module
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.weights import (
    Place,
    Transport,
    WeightSender,
    check_agreement,
    checked_weights,
    choose_transport,
    expected_weights,
    own_place,
)
from tests.ray_session import ray_cpus
from tests.rollout.updates import update
from tests.runtime.engines.shared import SharedEngine, gap, model_of, weights_of
from tests.tiny_models import KINDS, random_prompts, tiny_model

pytestmark = pytest.mark.xdist_group("ray")
CLOSE = {"float32": 1e-4, "bfloat16": 0.15}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_configuration_promises_is_what_its_model_exports(kind, tied):
    model = tiny_model(kind, tied=tied)
    exported = {name: tuple(tensor.shape) for name, tensor in merged_tensors(model)}
    expected, _ = expected_weights(json.dumps(model.config.to_dict()))
    assert list(expected.items()) == list(exported.items())
    assert ("lm_head.weight" in exported) is not tied


def test_gpt_oss_experts_are_sent_one_by_one():
    model = tiny_of(tiny_config(CONFIG_MAPPING["gpt_oss"]()))
    expected, stored = expected_weights(model.config.to_json_string())
    sent = dict(checked_weights(as_stored(merged_tensors(model), stored), expected))
    assert list(sent) == list(expected)
    experts = "model.layers.1.mlp.experts"
    whole = dict(model.named_parameters())[f"{experts}.gate_up_proj"]
    assert torch.equal(sent[f"{experts}.3.w13_weight"], whole[3])


def test_all_that_does_not_fit_is_listed_and_nothing_comes_after_it():
    expected = {"a": (2,), "b": (3,), "c": (4,), "d": (5,)}
    shapes = [("a", 2), ("b", 9), ("c", 4), ("extra", 1), ("a", 2)]
    came = []
    with pytest.raises(ValueError, match="weights must fit the generator's model") as error:
        for name, _ in checked_weights([(n, torch.zeros(size)) for n, size in shapes], expected):
            came.append(name)
    assert came == ["a"]
    for part in (
        "'b' does not fit (shape (9,), where (3,) is expected)",
        "'extra' does not fit (no such parameter)",
        "'a' does not fit (it came twice)",
        "'d' is missing",
    ):
        assert part in str(error.value)


HERE, BESIDE, BOTH, FAR, CPU = (
    Place(node, "host", 1, tuple(gpus)) for node, *gpus in ("a0", "a1", "a01", "b0", "a")
)
SRUN = [replace(HERE, uuids=(uuid,)) for uuid in ("one", "two")]
"""Each sees its GPU as the first, as with srun --gpus-per-task=1."""


@pytest.mark.parametrize(
    ("setting", "ranks", "engines", "chosen"),
    [
        ("auto", [CPU], [CPU, CPU], "object_store"),
        ("auto", [HERE], [HERE], "cuda_ipc"),
        ("auto", [HERE, BESIDE, FAR], [BOTH, FAR], "cuda_ipc"),
        ("auto", [HERE, BESIDE, FAR], [FAR], "cuda_ipc"),  # one of several came back
        ("auto", [HERE], [BESIDE, FAR], "nccl"),
        ("auto", [HERE], [HERE, BESIDE], "object_store"),
        ("auto", [HERE, HERE], [HERE], "object_store"),  # else only one's buffer would be opened
        ("auto", [HERE, CPU], [HERE], "object_store"),
        ("object_store", [HERE], [HERE], "object_store"),
        ("nccl", [HERE, BESIDE], [BESIDE], "nccl"),
        ("auto", [SRUN[0], SRUN[1]], [replace(SRUN[1], gpus=("3",))], "cuda_ipc"),
        ("auto", [SRUN[0], replace(SRUN[1], node="")], [SRUN[1]], "cuda_ipc"),
        ("auto", [SRUN[0]], [replace(SRUN[1], uuids=("one", "two"))], "object_store"),
        ("cuda_ipc", [CPU], [CPU], "every GPU of an engine to be a rank's"),
        ("cuda_ipc", [HERE, BESIDE], [FAR], "every GPU of an engine to be a rank's"),
        ("nccl", [HERE], [HERE], "engines on other GPUs than rank 0"),
    ],
)
def test_the_transport_follows_from_the_places(setting, ranks, engines, chosen):
    if " " in chosen:
        message = f"generation.weight_transport needs {chosen}, but it is '{setting}'"
        with pytest.raises(ValueError, match=message):
            choose_transport(setting, ranks, engines)
    else:
        assert choose_transport(setting, ranks, engines).name == chosen


@pytest.mark.parametrize(
    ("kind", "tied", "precision"),
    [
        ("qwen2", True, "float32"),
        pytest.param("mistral", True, "bfloat16", marks=pytest.mark.slow),
        pytest.param("mixtral", False, "float32", marks=pytest.mark.slow),
    ],
)
def test_after_each_update_the_engine_is_the_new_model(kind, tied, precision, monkeypatch):
    """Vocabularies of 42 are padded to 64. On CPUs vLLM's own reload forgets a tied output layer's
    repacked copy.
    """
    monkeypatch.setattr(module, "BUCKET_BYTES", 100_000)
    models = [model_of(kind, seed=seed, tied=tied) for seed in range(3)]
    engine = SharedEngine(models[0], precision=precision)
    for model in models:
        engine.give(model)
        assert gap(engine, model, precision) < CLOSE[precision]
    assert gap(engine, models[0], precision) > 10 * CLOSE[precision]  # which tells models apart


@pytest.mark.slow
def test_an_update_that_was_given_up_leaves_nothing_to_the_next(monkeypatch):
    """Half of a layer, too, which the other half of the next must not complete."""
    monkeypatch.setattr(module, "BUCKET_BYTES", 1)
    engine, wrong, right = SharedEngine(model_of()), weights_of(model_of(seed=1)), model_of(seed=2)

    def broken(count):
        yield from wrong[:count]
        raise ConnectionError("the trainer is gone")

    for count in (3, 8, len(wrong)):
        with pytest.raises(ConnectionError):
            engine.sender()(0, broken(count))
        assert not engine.do(lambda engines: engines.engine.usable)
        engine.give(right)
        assert gap(engine, right) < CLOSE["float32"]


SHAPES = {f"layers.{i}.{name}": (5 + i, 40) for i in range(10) for name in "ab"}


def random_weights():
    generator = torch.Generator().manual_seed(0)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def store_sender(*stores, **options):
    places, actors = dict.fromkeys(range(len(stores)), own_place()), dict(enumerate(stores))
    options = {"dtype": torch.float32, **options}
    return WeightSender(actors=actors, places=places, expected=SHAPES, **options)


@ray.remote
class Recorder:
    """In the place of an engine."""

    def __init__(self, seconds=0.0):
        self.seconds, self.calls = seconds, []

    def call(self, *what):
        self.calls.append(what)
        if what[0] == "load_weights":
            time.sleep(self.seconds)
        return {}

    def seen(self):
        calls, self.calls = self.calls, []
        return calls


def recorder(*args):
    ray_cpus()
    return Recorder.options(num_cpus=0).remote(*args)


@pytest.mark.slow
def test_engines_that_die_or_hang_are_named():
    fast, dead, hanging = recorder(), recorder(), recorder(30.0)
    ray.get([one.seen.remote() for one in (dead, hanging)])
    ray.kill(dead)
    failed = store_sender(fast, dead, hanging)(0, random_weights()).failed
    assert list(failed) == [1]  # none was sent a weight
    failed = store_sender(fast, hanging, timeout_s=2.0)(0, random_weights()).failed
    assert "it had not taken all new weights after 2 s (generation.timeout_s)" in failed[1]
    ray.kill(hanging)


class FakeEngine:
    """In the place of vLLM's own trainer's end, which needs a GPU."""

    made: ClassVar[list] = []

    def __init__(self, info, client, source):
        self.info, self.closed = info, threading.Event()
        self.made.append(self)
        nccl = {"rank_offset": 1, "world_size": getattr(info, "world_size", 0)}
        client.init_weight_transfer_engine(nccl if info.backend == "nccl" else {"packed": True})

    def send_weights(self):
        nccl = self.info.backend == "nccl"
        names = nccl and [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()]
        self.client.start_weight_update()
        sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.source]
        assert not nccl or sent == names
        self.client.update_weights({"names": [name for name, *_ in sent]})
        self.client.finish_weight_update()

    def shutdown(self):
        self.closed.set()


@pytest.fixture
def fakes(monkeypatch):
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    def connect(info, *, client, source):
        return FakeEngine(info, client, source)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", connect)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(module, "_CONNECTED", {})
    return FakeEngine.made


def gpu_sender(monkeypatch, transport, *actors, **options):
    monkeypatch.setattr(module, "choose_transport", lambda *_, **__: Transport(transport))
    return store_sender(*actors, dtype=torch.bfloat16, processes=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_vllms_own_transfer_engines_reach_every_replica(fakes, transport, monkeypatch):
    actors = [recorder(), recorder()]
    sender = gpu_sender(monkeypatch, transport, *actors)
    for _ in range(2):
        assert sender(3, random_weights()).failed == {}
    calls = [("begin_weights",), ("load_weights", {"names": list(SHAPES)}), ("finish_weights", 3)]
    for index, actor in enumerate(actors):
        first, *others = ray.get(actor.seen.remote())
        assert others == 2 * calls
        # A rank for the trainer, and then two for each replica.
        nccl = {"backend": "nccl", "info": {"rank_offset": 1 + 2 * index, "world_size": 5}}
        ipc = {"backend": "ipc", "info": {"packed": True}}
        assert first == ("connect", nccl if transport == "nccl" else ipc)
    assert gpu_sender(monkeypatch, transport, actors[0])(0, random_weights()).failed == {}
    assert len(fakes) == 2  # connected anew, because the engines have changed
    assert fakes[0].closed.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_gpus_send_weights_in_the_order_in_which_a_backend_yields_them(
    fakes, transport, monkeypatch
):
    """Megatron's is not Hugging Face's, and engines must hear first what NCCL brings."""
    monkeypatch.setattr(module, "ROUND_BYTES", 4096)
    actor = recorder()
    weights, gathered = random_weights()[::-1], []

    def gather():
        for name, tensor in weights:
            own = tensor.clone()
            gathered.append(weakref.ref(own))
            yield name, own

    assert gpu_sender(monkeypatch, transport, actor)(0, gather()).failed == {}
    assert all(each() is None for each in gathered), "none stays on the GPU until the next update"
    _, first, *rounds, last = ray.get(actor.seen.remote())
    assert first == ("begin_weights",) and last[0] == "finish_weights"
    names = [name for _, info in rounds for name in info["names"]]
    assert names == [name for name, _ in weights]
    assert len(rounds) == (1 if transport == "cuda_ipc" else 4)


def test_what_nccl_sends_is_on_the_gpu_before_vllm_packs_it(monkeypatch):
    """On streams that do not wait for the one which gathers."""
    events = []

    def gather():
        for name, tensor in random_weights():
            events.append("gather")
            yield name, tensor

    transfer = SimpleNamespace(send_weights=lambda: events.append("pack"))
    monkeypatch.setattr(module, "_connected", lambda *_: nullcontext(transfer))
    monkeypatch.setattr(module, "_CONNECTED", {})
    monkeypatch.setattr(module, "ROUND_BYTES", 8000)
    device = SimpleNamespace(synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    module.send_by_nccl(MagicMock(dtype=torch.float32), gather())
    said = "".join(each[0] for each in events)
    assert re.fullmatch("(g+wp){3,}", said) and said.count("g") == len(SHAPES)


@pytest.mark.slow
def test_the_buffer_of_ipc_holds_the_largest_weight(fakes, monkeypatch):
    """vLLM refuses a tensor that is larger than it, as every embedding of 64 MB was."""
    monkeypatch.setattr(module, "ROUND_BYTES", 100)
    actor = recorder()
    gpu_sender(monkeypatch, "cuda_ipc", actor)(0, random_weights())
    assert fakes[0].info.packed_buffer_size_bytes == 14 * 40 * 2


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_replicas_on_gpus(transport):
    """CUDA's own transports; on a CPU the tests before this one have fakes in their place."""
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    models = [model_of(seed=seed).to("cuda") for seed in range(2)]
    config = GenerationConfig(
        backend="vllm",
        weight_transport=transport,
        colocated=transport != "nccl",
        sleep_level=0,
        engine={"gpu_memory_utilization": 0.2},
    )
    backend = VLLMGenerationBackend(model=models[0], precision="bfloat16")
    backend.setup(config)
    try:
        for version, model in enumerate(models):
            update(backend, weights_of(model), version)
            trainer = DTensorBackend(model)
            trainer.setup(BackendConfig(trainer=TrainerConfig(device="cuda")))  # in bfloat16, too
            check_agreement(trainer, backend, random_prompts(1)[0], precision="bfloat16")
            trainer.shutdown()
    finally:
        backend.shutdown()

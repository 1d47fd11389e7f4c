"""New weights in vLLM's workers, in real engines: afterwards they must answer as the model does
that the weights came from.
"""

import threading
import time
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from nemorl import SamplingParams
from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.engine import Engine
from nemorl.runtime.engines.spec import Request, engine_spec
from nemorl.runtime.engines.transfer import EngineTransfer
from nemorl.runtime.engines.weight_buckets import WeightMismatch, expected_weights
from nemorl.runtime.engines.weight_packers import DirectBucket
from nemorl.runtime.engines.weight_transport import LocalReceiver, WeightSender
from nemorl.runtime.run.weight_sync import check_agreement
from tests.tiny_models import random_prompts, tiny_model

pytestmark = pytest.mark.xdist_group("vllm")
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96}
CLOSE = {"float32": 1e-4, "bfloat16": 0.15}


def model_of(kind="qwen2", *, seed=0, tied=True, **sizes):
    """With sharp predictions, and norms and biases that are not all ones and zeros."""
    model = tiny_model(kind, seed=seed, tied=tied, scale=3.0, **SIZES, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5)
    return model


@contextmanager
def engine_for(model, precision="float32", **options):
    config = GenerationConfig(
        backend="vllm", max_batch_size=16, engine={"kv_cache_memory_bytes": 16 << 20}, **options
    )
    engine = Engine(engine_spec(model, None, config, precision=precision))
    try:
        yield engine
    finally:
        engine.shutdown()


def weights_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def sender_for(model, precision="float32", transport="direct", **options):
    return WeightSender(
        expected_weights(model.config),
        dtype=getattr(torch, precision),
        transport=transport,
        **options,
    )


def gap(engine, model, precision="float32"):
    """The largest difference between the engine's logprobs of what it samples and the model's."""
    prompts = random_prompts(4, seed=3)
    params = SamplingParams(max_new_tokens=8, seed=5)
    engine.add(
        [Request(id=i, prompt=tuple(prompt), params=params) for i, prompt in enumerate(prompts)]
    )
    samples = {}
    while engine.unfinished:
        samples.update({finished.id: finished.samples[0] for finished in engine.step()})
    worst = 0.0
    model = model.to(getattr(torch, precision))
    for i, prompt in enumerate(prompts):
        tokens = list(samples[i].token_ids)
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *tokens]]), use_cache=False)
                .logits[0, len(prompt) - 1 : -1]
                .float()
            )
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(samples[i].logprobs)).abs().max().item())
    model.float()
    return worst


def send(sender, model, engine):
    assert sender.send(weights_of(model), [LocalReceiver(engine)]) == {}


@pytest.mark.parametrize(
    ("kind", "tied", "precision"),
    [
        ("qwen2", True, "float32"),
        ("llama", False, "float32"),
        ("mistral", True, "bfloat16"),
        ("qwen3", False, "bfloat16"),
    ],
)
def test_after_each_update_the_engine_is_the_new_model(kind, tied, precision):
    """Vocabularies of 42 are padded to 64.

    Tied models: the output layer's repacked copy has to follow, which vLLM's own reload forgets on
    CPUs.
    """
    models = [model_of(kind, seed=seed, tied=tied) for seed in range(3)]
    with engine_for(models[0], precision) as engine:
        sender = sender_for(models[0], precision, "shared_memory", bucket_bytes=100_000)
        for model in models:
            send(sender, model, engine)
            assert gap(engine, model, precision) < CLOSE[precision]
        assert (
            gap(engine, models[0], precision) > 10 * CLOSE[precision]
        )  # so that the test can tell models apart


@pytest.fixture(scope="module")
def tied():
    model = model_of()
    with engine_for(model) as engine:
        yield model, engine, sender_for(model)


def test_the_order_of_the_weights_does_not_matter_nor_where_buckets_end(tied):
    model, engine, _ = tied
    other = model_of(seed=1)
    for bucket_bytes in (1, 30_000):
        backwards = dict(reversed(expected_weights(model.config).items()))
        sender = WeightSender(
            backwards, dtype=torch.float32, transport="shared_memory", bucket_bytes=bucket_bytes
        )
        assert sender.send(weights_of(other)[::-1], [LocalReceiver(engine)]) == {}
        assert gap(engine, other) < CLOSE["float32"]
        send(sender_for(model), model, engine)


def test_an_update_that_was_given_up_leaves_nothing_to_the_next(tied):
    """Half of the layers have come, and half of one: its second half must not be completed by the
    first half of old.
    """
    _, engine, sender = tied
    wrong, right = weights_of(model_of(seed=1)), model_of(seed=2)
    for count in (1, 3, 8, len(wrong)):
        engine.begin_weights()
        engine.load_weights(DirectBucket(wrong[:count]))
        assert not engine.usable
        send(sender, right, engine)
        assert engine.usable
        assert gap(engine, right) < CLOSE["float32"]


def test_an_engine_that_lacks_weights_says_which(tied):
    model, engine, sender = tied
    weights = [
        item
        for item in weights_of(model)
        if "layers.1.self_attn.k_proj.weight" not in item[0] and "norm" not in item[0]
    ]
    engine.begin_weights()
    engine.load_weights(DirectBucket(weights))
    with pytest.raises(
        RuntimeError,
        match=(
            r"have not come whole:"
            r" .*model.layers.0.input_layernorm.*model.layers.1.self_attn.qkv_proj \(.* of .*\)"
        ),
    ):
        engine.finish_weights()
    assert not engine.usable
    send(sender, model, engine)
    assert gap(engine, model) < CLOSE["float32"]


def test_weights_of_another_model_are_refused_before_the_engine_is_touched(tied):
    model, engine, sender = tied
    send(sender, model, engine)
    weights = [
        (name, tensor[:-1] if "layers.1.mlp.up" in name else tensor)
        for name, tensor in weights_of(model)
    ]
    weights = [
        ("extra", weights[0][1]),
        *[item for item in weights if item[0] != "model.norm.weight"],
    ]
    with pytest.raises(WeightMismatch) as error:
        sender.send(weights, [LocalReceiver(engine)])
    for part in (
        "'extra' does not fit (no such parameter)",
        "'model.layers.1.mlp.up_proj.weight' does not fit (shape (95, 128), where (96, 128)",
    ):
        assert part in str(error.value)
    assert "'model.norm.weight' is missing" in str(error.value)
    assert engine.usable
    assert gap(engine, model) < CLOSE["float32"]


def test_a_part_that_can_not_be_loaded_makes_the_engine_unusable_until_the_next_update(tied):
    model, engine, sender = tied
    engine.begin_weights()
    with pytest.raises(AssertionError):
        engine.load_weights(DirectBucket([("model.embed_tokens.weight", torch.zeros(3, 4))]))
    for call in (
        lambda: engine.load_weights(DirectBucket(weights_of(model))),
        engine.finish_weights,
    ):
        with pytest.raises(RuntimeError, match="begin it anew"):
            call()
    assert not engine.usable
    send(sender, model, engine)
    assert gap(engine, model) < CLOSE["float32"]


def test_each_worker_of_a_split_engine_takes_its_part():
    models = [model_of(seed=seed) for seed in range(2)]
    with engine_for(models[0], tensor_parallel_size=2) as engine:
        sender = sender_for(models[0], transport="shared_memory", bucket_bytes=100_000)
        for model in models:
            send(sender, model, engine)
            assert gap(engine, model) < CLOSE["float32"]


class FakeEngine:
    """In the place of vLLM's own trainer's end, which needs a GPU: what it asks of its client and
    its source, and nothing else.
    """

    hangs: str | None = None
    daemons: ClassVar[list[bool]] = []

    def __init__(self, info, client, source):
        self.info, self.client, self.source, self.closed = info, client, source, threading.Event()
        self.hang("connect")
        client.init_weight_transfer_engine(
            {"packed": True}
            if info.backend == "ipc"
            else {"rank_offset": 1, "world_size": info.world_size}
        )

    def send_weights(self):
        assert [(meta.name, tuple(meta.shape)) for meta in self.source.metadata()] == [
            ("a", (2,)),
            ("b", (3,)),
        ]
        self.hang("send")
        self.client.start_weight_update()
        self.client.update_weights(
            {"names": [(name, tensor.dtype) for name, tensor in self.source]}
        )
        self.client.finish_weight_update()

    def shutdown(self):
        self.closed.set()
        self.hang("shutdown")

    def hang(self, where):
        if self.hangs == where:
            self.daemons.append(threading.current_thread().daemon)
            time.sleep(600)


class Replica:
    def __init__(self, fails=False):
        self.fails, self.messages = fails, []

    def ranks(self):
        return [
            info["rank_offset"]
            for _, (kind, info) in (message for message in self.messages if message[1:])
            if kind == "init"
        ]

    def start(self, method, *args):
        self.messages.append((method, *(payload.transfer for payload in args)))
        return LocalReceiver(self).start("answer", method, args)

    def answer(self, method, args):
        if self.fails and (args[0].transfer[0] == "update" if args else method == self.fails):
            raise RuntimeError("out of memory")


@pytest.fixture
def fakes(monkeypatch):
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    made = []

    def connect(info, *, client, source):
        made.append(FakeEngine(info, client, source))
        return made[-1]

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", connect)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(EngineTransfer, "device", "cpu")
    return made


PAIR = {"a": (2,), "b": (3,)}


def pair(names="ab"):
    return [(name, torch.zeros(PAIR[name])) for name in names]


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_vllms_own_transfer_engines_reach_every_replica(fakes, transport):
    replicas = [Replica(), Replica()]
    sender = WeightSender(PAIR, dtype=torch.bfloat16, transport=transport, processes=2)
    for _ in range(2):
        assert sender.send(pair(), replicas) == {}
    update = ("load_weights", ("update", {"names": [("a", torch.bfloat16), ("b", torch.bfloat16)]}))
    for index, replica in enumerate(replicas):
        first, *others = [
            message for message in replica.messages if message[1:] and message[1][0] == "init"
        ]
        replica.messages = [
            message for message in replica.messages if not message[1:] or message[1][0] != "init"
        ]
        assert replica.messages == [("begin_weights",), update, ("finish_weights",)] * 2
        if (
            transport == "nccl"
        ):  # the group stays as long as its members do; a rank for the trainer, and then two for each replica
            assert (first[1][1], others) == ({"rank_offset": 1 + 2 * index, "world_size": 5}, [])
    assert len(fakes) == (1 if transport == "nccl" else 2)
    sender.close()
    assert fakes[-1].closed.wait(10)


def test_a_replica_that_fails_fails_alone_by_cuda_ipc_and_with_all_by_nccl(fakes):
    for transport, expected in (("cuda_ipc", {1}), ("nccl", {0, 1, 2})):
        replicas = [Replica(), Replica(fails=True), Replica()]
        failed = WeightSender(PAIR, dtype=torch.float32, transport=transport).send(pair(), replicas)
        assert set(failed) == expected
        assert str(failed[1]) == "out of memory"
        assert [("finish_weights",) in replica.messages for replica in replicas] == [
            index not in expected for index in range(3)
        ]


def test_an_nccl_group_is_of_those_that_live_and_made_anew_when_one_dies(fakes, monkeypatch):
    monkeypatch.setattr(FakeEngine, "hangs", "shutdown")  # as it may when members are gone
    replicas = [Replica(), Replica("begin_weights"), Replica(), Replica()]
    sender = WeightSender(PAIR, dtype=torch.float32, transport="nccl", processes=2)
    assert list(sender.send(pair(), replicas)) == [1]
    assert fakes[0].info.world_size == 7 and [replica.ranks() for replica in replicas] == [
        [1],
        [],
        [3],
        [5],
    ]
    replicas[0].fails = "begin_weights"
    assert list(sender.send(pair(), replicas)) == [0, 1]
    assert (
        len(fakes) == 2
        and fakes[1].info.world_size == 5
        and [replica.ranks() for replica in replicas] == [[1], [], [3, 1], [5, 3]]
    )
    for replica in replicas:
        replica.fails = "begin_weights"
    assert list(sender.send(pair(), replicas)) == [0, 1, 2, 3] and len(fakes) == 2
    sender.close()


@pytest.mark.parametrize("where", ["connect", "send"])
def test_a_transfer_that_hangs_is_a_time_out_of_all_that_live_and_holds_nothing_up(
    fakes, monkeypatch, where
):
    monkeypatch.setattr(FakeEngine, "hangs", where)
    monkeypatch.setattr(FakeEngine, "daemons", [])
    sender, replicas = (
        WeightSender(PAIR, dtype=torch.float32, transport="nccl", timeout_s=0.3),
        [Replica(), Replica("begin_weights"), Replica()],
    )
    failed = sender.send(pair(), replicas)
    assert {index: type(error).__name__ for index, error in failed.items()} == {
        0: "WorkerTimeout",
        1: "RuntimeError",
        2: "WorkerTimeout",
    }
    assert str(failed[0]).startswith(
        "the weights were not through by nccl within 0.3 s (generation.timeout_s)"
    ) and FakeEngine.daemons == [True]
    monkeypatch.setattr(FakeEngine, "hangs", None)
    assert list(sender.send(pair(), replicas)) == [1]


def test_weights_in_another_order_are_an_error_before_anything_hangs(fakes):
    failed = WeightSender(PAIR, dtype=torch.float32, transport="nccl").send(pair("ba"), [Replica()])
    assert "must come in the model's order for nccl, but 'b' came before 'a'" in str(failed[0])


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "shared_memory"])
def test_replicas_on_gpus(transport):
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    models = [model_of(seed=seed).to("cuda") for seed in range(2)]
    config = GenerationConfig(
        backend="vllm",
        num_replicas=1,
        weight_transport=transport,
        colocated=transport != "nccl",
        sleep_level=0,
        engine={"gpu_memory_utilization": 0.2},
    )
    backend = VLLMGenerationBackend(model=models[0], precision="bfloat16")
    backend.setup(config)
    try:
        for version, model in enumerate(models):
            backend.update_weights(weights_of(model), version)
            trainer = DTensorBackend(model)
            trainer.setup(BackendConfig(trainer=TrainerConfig(device="cuda")))
            check_agreement(trainer, backend, random_prompts(1)[0], precision="bfloat16")
            trainer.shutdown()
    finally:
        backend.shutdown()

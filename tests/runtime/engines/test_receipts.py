"""The receipt of weights: an engine that holds others than it was sent is found out, by name."""

from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemorl.models.digest import WeightsDiffer, differences, sampled
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.weights import WeightSender
from tests.ray_session import ray_cpus
from tests.rollout.updates import update
from tests.runtime.engines.shared import SharedEngine
from tests.runtime.engines.test_weights import model_of, weights_of
from tests.runtime.engines.toys import toys
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.parametrize("shape", [(), (5,), (300,), (6, 4), (40, 9), (3, 20, 7)])
@pytest.mark.parametrize("version", [0, 1, 7])
def test_samples_are_few_and_stay_in_their_places(shape, version):
    """Equal tensors have equal samples, and every number differs from all others."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = sampled(tensor, version)
    assert found.numel() <= 64 and found.unique().numel() == found.numel()
    assert torch.equal(found, sampled(tensor.clone(), version))


def test_consecutive_versions_look_elsewhere():
    tensor = torch.arange(10_000.0).view(100, 100)
    seen = torch.cat([sampled(tensor, version) for version in range(20)])
    assert seen.unique().numel() > 1000


def test_differences_are_named_and_counted():
    sent = {f"w{i}": torch.full((4,), float(i)) for i in range(8)}
    assert differences(sent, sent) == ""
    found = {name: values + 1 for name, values in sent.items()}
    said = differences(sent, found)
    assert said.startswith("'w0' has 1 where 0 was sent") and said.endswith(" and 3 more")


@pytest.mark.parametrize("found", [0.0, torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_differs_from_one_that_is(found):
    sent = {"a": torch.ones(4)}
    assert differences(sent, {"a": torch.tensor([1.0, 1.0, found, 1.0])}).startswith("'a' has ")
    broken = {"a": torch.tensor([1.0, torch.nan, torch.inf, 1.0])}
    assert differences(broken, broken) == ""
    assert "has 1 where nan was sent" in differences(broken, sent)


def receipt_of(readings, sent=None):
    """The receipt of two engines, of which one has read these numbers and the other one nothing."""
    sent = {"a": torch.ones(4), "b": torch.ones(2)} if sent is None else sent
    options = {"places": {}, "expected": {}, "dtype": torch.float32, "readings": readings}
    return WeightSender(actors=dict.fromkeys(readings or [0, 1]), **options)._receipt(sent)


def test_what_was_not_read_is_not_proved():
    whole = {"a": ("a", [1.0] * 4), "b": ("b", [1.0] * 2)}
    head = ("lm_head.weight, tied to a", ("a", [1.0, None, 1.0, 1.0]))
    assert receipt_of({}).unproved == {"a", "b"}
    assert receipt_of({0: whole}).unproved == set()
    assert receipt_of({0: whole, 1: {"a": whole["a"]}}).unproved == {"b"}
    half = receipt_of({0: {**whole, "b": ("b", [None, 1.0])}})
    assert (half.unproved, half.wrong) == ({"b"}, {})
    assert receipt_of({0: {**whole, head[0]: head[1]}}).unproved == {"a"}
    for found in (2, nan, torch.inf):
        wrong = receipt_of({0: {**whole, "b": ("b", [None, float(found)])}}).wrong
        assert wrong == {0: f"'b' has {found} where 1 was sent"}


def bare(kind, weight, **attributes):
    """A layer of vLLM's without its group of processes."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(weight)
    rows, width = weight.shape
    sizes = {"output_size": rows, "input_size": width}
    sizes |= {"org_vocab_size": rows, "embedding_dim": width, "tp_rank": 0, "tp_size": 1}
    for name, value in {**sizes, **attributes}.items():
        setattr(layer, name, value)
    return layer


def linear(weight):
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    return bare(ReplicatedLinear, weight, quant_method=UnquantizedLinearMethod())


def table(weight, kind=None, **attributes):
    from vllm.model_executor.layers import vocab_parallel_embedding as module

    places = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=len(weight))
    attributes = {"quant_method": module.UnquantizedEmbeddingMethod(), **attributes}
    kind = kind or module.VocabParallelEmbedding
    return bare(kind, weight, shard_indices=places, **attributes)


def read(model, **sent):
    from nemorl.runtime.engines.readback import readings

    shapes = {name.replace("_weight", ".weight"): tuple(one.shape) for name, one in sent.items()}
    return {name: values for name, _, values in readings(model, shapes, 0)}


def test_a_head_with_a_parameter_of_its_own_is_read_where_none_was_sent():
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    weight = torch.rand(42, 16)
    model = nn.Module()
    model.embed, model.lm_head = table(weight), table(weight + 1, ParallelLMHead)
    found = read(model, embed_weight=weight)
    sent = sampled(weight)
    assert found["embed.weight"] == sent.tolist()
    assert found["lm_head.weight, tied to embed.weight"] == sampled(weight + 1).tolist()
    assert list(read(model, embed_weight=weight, lm_head_weight=weight)) == [
        "embed.weight",
        "lm_head.weight",
    ]
    model.lm_head.quant_method = None  # as where it is quantized
    found = read(model, embed_weight=weight)
    assert set(found["lm_head.weight, tied to embed.weight"]) == {None}


def test_matrices_that_are_transposed_on_loading_are_not_read():
    """GPT-2's: the square ones look as all others do."""
    wide, square, plain = torch.rand(32, 96), torch.rand(64, 64), torch.rand(32, 96)
    model = nn.Module()
    model.wide, model.square, model.plain = map(linear, (wide.t(), square.t(), plain))
    model.table = table(torch.rand(32, 32))
    assert list(read(model, plain_weight=plain, square_weight=square)) == [
        "plain.weight",
        "square.weight",
    ]
    found = read(
        model,
        wide_weight=wide,
        square_weight=square,
        plain_weight=plain,
        table_weight=plain[:, :32],
    )
    assert list(found) == ["plain.weight", "table.weight"]


def test_a_tensor_that_can_not_be_read_is_left_out():
    wide = torch.rand(32, 96)
    model = nn.Module()
    model.broken, model.plain = linear(wide), linear(wide)
    del model.broken.tp_rank
    assert list(read(model, broken_weight=wide, plain_weight=wide)) == ["plain.weight"]


@pytest.mark.parametrize(
    ("kind", "tied", "precision"),
    [
        ("qwen2", True, "float32"),
        ("llama", False, "float32"),
        ("mistral", True, "bfloat16"),
        ("qwen3", False, "bfloat16"),
        ("mixtral", False, "float32"),
        ("qwen3_moe", True, "bfloat16"),
    ],
)
def test_a_real_engine_proves_every_weight(kind, tied, precision):
    """Fused, with biases, padded from 42 to 64 tokens, repacked, and cast; experts, too."""
    model = model_of(kind, tied=tied)
    engine = SharedEngine(model, weights=False, precision=precision)
    for version in (0, 1, 5):
        sender = engine.sender()
        receipt = sender(version, weights_of(model))
        receipt.check()
        assert (receipt.version, receipt.failed, receipt.unproved) == (version, {}, frozenset())
        assert receipt.num_weights == len(sender.expected)


def receive(change):
    """In the engine's process: have it load what `change` makes of a bucket's tensors."""

    def patch(engines):
        from nemorl.runtime.engines.receiver import Receiver
        from nemorl.runtime.engines.weights import unpacked

        def receive_weights(self, update_info):
            self.model.load_weights(change(list(unpacked(update_info))))

        Receiver.unharmed = Receiver.receive_weights
        Receiver.receive_weights = receive_weights

    return patch


def repair(engines):
    from nemorl.runtime.engines.receiver import Receiver

    Receiver.receive_weights = Receiver.unharmed


GATES = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
EXPERTS = [f"model.layers.0.block_sparse_moe.experts.{name}.weight" for name in ("0.w1", "3.w3")]


def swapped(tensors):
    names = {*GATES, *EXPERTS}.intersection(dict(tensors))
    other = dict(zip(sorted(names), sorted(names, reverse=True), strict=True))
    return [(other.get(name, name), tensor) for name, tensor in tensors]


def doubled(tensors):
    """One is lost; another of its shape comes twice, so that the count is right."""
    found = dict(tensors)
    lost = "model.layers.1.self_attn.k_proj.weight"
    twice = (lost.replace("k_proj", "v_proj"), found[lost.replace("k_proj", "v_proj")])
    return [twice if name == lost else (name, tensor) for name, tensor in tensors]


@pytest.mark.parametrize(
    ("kind", "change", "named", "seed"),
    [
        ("qwen2", swapped, GATES, 1),
        ("mixtral", swapped, EXPERTS, 1),
        # Of no other test: what is lost is what the memory held before.
        ("qwen2", doubled, ["model.layers.1.self_attn.k_proj.weight"], 17),
    ],
)
def test_weights_in_the_wrong_place_are_named(kind, change, named, seed):
    old, new = model_of(kind), model_of(kind, seed=seed)
    engine = SharedEngine(old)
    engine.do(receive(change))
    try:
        receipt = engine.sender()(4, weights_of(new))
        with pytest.raises(WeightsDiffer, match=r"replica 0 must .* weights of version 4") as error:
            receipt.check()
    finally:
        engine.do(repair)
    for name in named:
        assert f"{name!r} has " in str(error.value)
    assert str(error.value).count(" was sent") == len(named)
    engine.give(new)


def test_a_lost_tensor_is_named():
    """vLLM's own count of what a layer has tells, before the receipt."""

    def lost(tensors):
        return [one for one in tensors if "layers.1.post_attention_layernorm" not in one[0]]

    engine = SharedEngine(model_of())
    engine.do(receive(lost))
    try:
        receipt = engine.sender()(4, weights_of(model_of(seed=1)))
    finally:
        engine.do(repair)
    assert "incomplete: model.layers.1.post_attention_layernorm" in receipt.failed[0]
    engine.give(model_of())


def test_a_tied_head_that_stays_old_is_named():
    """On CPUs the head computes with a repacked copy of the embedding's weights."""

    def patch(engines):
        from nemorl.runtime.engines.receiver import Receiver

        Receiver.unharmed = Receiver.finish_weight_update

        def finish(self):
            tied, self.tied = self.tied, []
            self.unharmed()
            self.tied = tied

        Receiver.finish_weight_update = finish

    def mend(engines):
        from nemorl.runtime.engines.receiver import Receiver

        Receiver.finish_weight_update = Receiver.unharmed

    engine = SharedEngine(model_of())
    engine.do(patch)
    try:
        receipt = engine.sender()(4, weights_of(model_of(seed=1)))
    finally:
        engine.do(mend)
    said = receipt.wrong[0]
    assert said.startswith("'lm_head.weight, tied to model.embed_tokens.weight' has ")
    assert said.count(" was sent") == 1
    engine.give(model_of())


def test_a_replica_that_is_left_behind_ends_the_run(tmp_path):
    ray_cpus()
    with toys(tmp_path) as pair:
        pair.update(1.0, version=1)
        pair.fault("behind", 1)
        expected = "replica 1 must compute .* of version 2, .*embed_tokens.weight' has 1 where 2"
        with pytest.raises(WeightsDiffer, match=expected):
            pair.update(2.0, version=2)
        assert not pair.replicas._router.state.supplied
        pair.repair()
        pair.update(2.0, version=2)
        measured = pair.replicas.metrics()
        assert measured["weights/unproved"] == 0 < measured["weights/proved"]


def test_a_copy_in_this_process_is_compared_as_well():
    """As where two parameters are the same memory that should not be."""
    model = tiny_model(tied=False)
    other = tiny_model(tied=False, seed=1)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = nn.Parameter(layers[0].mlp.up_proj.weight.data)
    backend = TorchGenerationBackend(model=model)
    backend.setup(GenerationConfig())
    with pytest.raises(RuntimeError, match=r"'model.layers.0.mlp.up_proj.weight' has "):
        update(backend, other.named_parameters(), 1)
    assert backend.policy_version is None

"""The receipt of weights: others than were sent are found by name, or by the logprobs."""

import pytest
import torch
from torch import nn

from nemorl.models.tensor_files import WeightsDiffer, differences, sampled, tensor_checksum
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.weights import AGREEMENT, WeightSender
from tests.ray_session import ray_cpus
from tests.rollout.updates import update
from tests.runtime.engines.shared import SharedEngine, gap, model_of, weights_of
from tests.runtime.engines.toys import toys
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.parametrize("shape", [(), (5,), (300,), (6, 4), (40, 9), (3, 20, 7)])
@pytest.mark.parametrize("version", [0, 7])
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


@pytest.mark.parametrize("found", [0.0, torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_differs_from_one_that_is(found):
    sent = {"a": torch.ones(4)}
    assert differences(sent, {"a": torch.tensor([1.0, 1.0, found, 1.0])}).startswith("'a' has ")
    broken = {"a": torch.tensor([1.0, torch.nan, torch.inf, 1.0])}
    assert differences(broken, broken) == ""
    assert "has 1 where nan was sent" in differences(broken, sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (7,), (6, 4), (3, 5, 4)])
def test_a_checksum_is_of_every_bit_and_its_row(shape, dtype):
    tensor = torch.arange(1, torch.Size(shape).numel() + 1).view(shape).to(dtype)
    found = int(tensor_checksum(tensor))
    assert found == int(tensor_checksum(tensor.clone()))
    if shape:
        apart, behind = torch.stack([tensor, tensor], -1), torch.cat([tensor[:1], tensor])
        assert found == int(tensor_checksum(apart[..., 1])) == int(tensor_checksum(behind[1:]))
        assert found != int(tensor_checksum(tensor.flip(0)))
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[i * tensor.element_size()] ^= 1
        assert int(tensor_checksum(other)) != found


@pytest.mark.parametrize(
    ("arrived", "said"),
    [
        ([("a", 1), ("b", 2)], ""),
        ([("b", 2), ("a", 1)], ""),
        ([], "'a' did not arrive, 'b' did not arrive"),
        ([("a", 1)], "'b' did not arrive"),
        ([("a", 2), ("b", 1)], "'a' arrived with other numbers, 'b' arrived with other numbers"),
        ([("a", 1), ("b", 2), ("b", 2)], "'b' arrived 2 times"),
        ([("a", 1), ("b", 2), ("c", 3)], "'c' was not sent"),
    ],
)
def test_what_arrived_otherwise_is_named(arrived, said):
    """Of each replica, and of each of its workers that differ."""
    sent = {"a": torch.tensor(1), "b": torch.tensor(2)}
    whole = [[("a", 1), ("b", 2)]]
    options = {"places": {}, "expected": {}, "dtype": torch.float32, "actors": {0: None, 1: None}}
    receipt = WeightSender(**options, arrived={0: whole, 1: [*whole, arrived]})._receipt(sent)
    assert receipt.wrong == ({1: said} if said else {}) and receipt.num_weights == 2


def harm(name, change):
    """In the engine's process: replace what the receiver calls `name`, or put it back."""

    def patch(engines):
        from nemorl.runtime.engines import receiver

        owner = receiver if hasattr(receiver, name) else receiver.Receiver
        unharmed = getattr(getattr(owner, name), "unharmed", getattr(owner, name))
        harmed = change(unharmed) if change else unharmed
        if change:
            harmed.unharmed = unharmed
        setattr(owner, name, harmed)

    return patch


def on_the_way(change):
    return "unpacked", lambda unpacked: lambda bucket: change(list(unpacked(bucket)))


def in_the_model(change):
    return "_noted", lambda noted: lambda self, weights: change(list(noted(self, weights)))


def head_forgotten(finish):
    """On CPUs the head computes with a repacked copy of the embedding's weights."""

    def harmed(self):
        tied, self.tied = self.tied, []
        finish(self)
        self.tied = tied

    return harmed


GATES = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
EXPERTS = [f"model.layers.0.block_sparse_moe.experts.{name}.weight" for name in ("0.w1", "3.w3")]
NORM = "model.layers.1.post_attention_layernorm.weight"
KEY, VALUE = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")


def swapped(tensors):
    names = {*GATES, *EXPERTS}.intersection(dict(tensors))
    other = dict(zip(sorted(names), sorted(names, reverse=True), strict=True))
    return [(other.get(name, name), tensor) for name, tensor in tensors]


def doubled(tensors):
    """One is lost, and another of its shape comes twice."""
    twice = VALUE, dict(tensors)[VALUE]
    return [twice if name == KEY else (name, tensor) for name, tensor in tensors]


def lost(tensors):
    return [one for one in tensors if one[0] != NORM]


OTHER = "{!r} arrived with other numbers".format


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("qwen2", on_the_way(swapped), list(map(OTHER, GATES))),
        ("mixtral", on_the_way(swapped), list(map(OTHER, EXPERTS))),
        ("qwen2", on_the_way(doubled), [f"{KEY!r} did not arrive", f"{VALUE!r} arrived 2 times"]),
        ("qwen2", on_the_way(lost), f"incomplete: {NORM.removesuffix('.weight')} "),
        ("qwen2", in_the_model(lost), f"incomplete: {NORM.removesuffix('.weight')} "),
        ("qwen2", in_the_model(swapped), None),
        ("mixtral", in_the_model(swapped), None),
        ("qwen2", in_the_model(doubled), None),
        ("qwen2", ("finish_weight_update", head_forgotten), None),
    ],
)
def test_weights_that_do_not_get_where_they_belong_are_found(kind, fault, said):
    """On their way by the receipt, what vLLM loses by its count, and what it puts elsewhere by the
    logprobs.
    """
    old, new = model_of(kind), model_of(kind, seed=17)
    engine = SharedEngine(old)
    name, change = fault
    engine.do(harm(name, change))
    try:
        receipt = engine.sender()(4, weights_of(new))
        if said is None:
            receipt.check()
            assert gap(engine, new) > 10 * AGREEMENT["float32"]
    finally:
        engine.do(harm(name, None))
    if isinstance(said, str):
        assert said in receipt.failed[0]
    elif said:
        with pytest.raises(WeightsDiffer, match=r"replica 0 must .* weights of version 4") as error:
            receipt.check()
        assert f"did not: {', '.join(said)}; resume" in str(error.value)
    engine.give(new)
    assert gap(engine, new) < 1e-4


@pytest.mark.slow
def test_a_replica_that_is_left_behind_ends_the_run(tmp_path):
    ray_cpus()
    with toys(tmp_path) as pair:
        pair.update(1.0, version=1)
        pair.fault("behind", 1)
        expected = "replica 1 must .* of version 2, .*embed_tokens.weight' did not arrive"
        with pytest.raises(WeightsDiffer, match=expected):
            pair.update(2.0, version=2)
        assert not pair.replicas._router.state.supplied
        pair.repair()
        pair.update(2.0, version=2)
        assert pair.replicas.metrics()["weights/proved"] > 0


def test_a_copy_in_this_process_is_compared_as_well():
    """As where two parameters share memory."""
    model = tiny_model(tied=False)
    other = tiny_model(tied=False, seed=1)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = nn.Parameter(layers[0].mlp.up_proj.weight.data)
    backend = TorchGenerationBackend(model=model)
    backend.setup(GenerationConfig())
    with pytest.raises(RuntimeError, match=r"'model.layers.0.mlp.up_proj.weight' has "):
        update(backend, other.named_parameters(), 1)
    assert backend.policy_version is None

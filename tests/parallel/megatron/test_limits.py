"""What megatron can't do is said before a process is started, with the numbers."""

from typing import Any

import pytest
from transformers import GemmaConfig

import nemorl
from nemorl.parallel.backends import check_training
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.megatron import limits
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.run.devices import Devices
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:parallel asks for")


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def config(plan: dict[str, Any], *, backend: str = "megatron", **options: Any) -> nemorl.SFTConfig:
    trainer = nemorl.TrainerConfig(backend=backend, device="cpu")
    return nemorl.SFTConfig(parallel=ParallelPlan(**plan), trainer=trainer, **options)


def devices(plan: dict[str, Any], **options: Any) -> Devices:
    return Devices.of(config(plan, **options), {}, num_gpus=0)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ({"compile": True}, {}, "parallel.compile must be off with trainer.backend megatron"),
        (
            {},
            {"optimizer": nemorl.OptimizerConfig(name="muon")},
            "optimizer.name must be adamw with trainer.backend megatron, but it is 'muon'",
        ),
        ({}, {"lora": nemorl.LoRAConfig(rank=4)}, "lora.rank must be 0 .* it is 4: .* dtensor"),
    ],
)
def test_settings_that_would_do_nothing(plan, options, message):
    with pytest.raises(ValueError, match=message):
        devices(plan, **options)


SELECTIVE = {"activation_checkpointing": "selective"}
UNFIT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {"pp": 4}, {"num_hidden_layers": 3}, "pp 4 has more stages .* at most 3 here"),
    ("llama", {"tp": 2}, {"vocab_size": 43}, "tp 2 does not divide the model's vocab_size 43"),
    ("llama", {"cp": 3}, {}, "cp 3 · tp 1 does not divide .*heads 4, .* take .*allgather"),
    ("llama", {}, {"attention_bias": True}, "the model's attention_bias must be False"),
    (
        "llama",
        {"pp": 2, "num_layers_in_first_pipeline_stage": 4},
        {"num_hidden_layers": 4},
        "first_pipeline_stage 4 leave 0 of .* 4 for the other 1 stages: change these, or remov",
    ),
    ("llama", {"dp_shard": 2, "ep": 2}, {}, "parallel.ep 2 is for mixtures of experts: .* remove"),
    ("qwen3_moe", {"dp_shard": 3, "ep": 3}, {}, "ep 3 does not divide .* num_local_experts 4"),
    (
        "qwen3_moe",
        {"tp": 2, "sequence_parallel": False},
        {},
        "experts with parallel.tp 2 need .*sequence_parallel",
    ),
    ("qwen3_moe", {}, {"mlp_only_layers": [1]}, r"mlp_only_layers must be \[\]"),
    (
        "mixtral",
        SELECTIVE | {"recompute_modules": ("mlp",)},
        {},
        "must not have mlp, which a mixture of experts lacks",
    ),
    ("mistral", {}, {"sliding_window": 4}, "sliding attention window must be off .* it is 4"),
    ("starcoder2", {}, {"residual_dropout": 0.1}, "residual_dropout must be 0.0 .* it is 0.1"),
]


@pytest.mark.parametrize(("kind", "plan", "sizes", "message"), UNFIT)
def test_models_that_do_not_fit(kind, plan, sizes, message):
    model = tiny_model(kind, **sizes).config
    with pytest.raises(ValueError, match=message):
        devices(plan).check_model(model)


def test_a_family_that_is_unknown():
    with pytest.raises(ValueError, match=r"the model's type must be llama, .* but it is 'gemma'"):
        devices({}).check_model(GemmaConfig(num_hidden_layers=2))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "must be at least 1, but it is 0"),
        ({"pp": 1}, "needs parallel.pp above 1, but it is 3: remove it, or raise parallel.pp"),
        ({"pp": 2, "vpp": 2}, "must be a multiple of parallel.vpp, which is 2, but it is 3"),
    ],
)
def test_ends_that_no_model_has(plan, message):
    count = 3 if plan else 0
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        with pytest.raises(ValueError, match=rf"parallel.{name}.*({message})"):
            ParallelPlan(**{"pp": 2, **plan, name: count})


def test_fsdp2_overlaps_by_itself():
    devices({"overlap_grad_reduce": True})
    with pytest.raises(ValueError, match=r"overlap_grad_reduce must be off .*: FSDP2 overlaps by"):
        devices({"overlap_grad_reduce": True}, backend="dtensor")
    devices({"overlap_grad_reduce": True, "overlap_param_gather": True})
    with pytest.raises(ValueError, match="gather needs parallel"):
        ParallelPlan(overlap_param_gather=True)


def test_what_is_for_experts():
    def of(backend: str, **options: Any) -> nemorl.GRPOConfig:
        trainer = nemorl.TrainerConfig(backend=backend, device="cpu", **options)
        return nemorl.GRPOConfig(trainer=trainer)

    with pytest.raises(ValueError, match=r"trainer.router_bias_update_rate needs .*dtensor"):
        Devices.of(of("megatron", router_bias_update_rate=0.1), {}, num_gpus=0)
    for name, value in (("router_replay", True), ("router_aux_loss_coef", 0.1)):
        for backend in ("dtensor", "megatron"):
            found = Devices.of(of(backend, **{name: value}), {}, num_gpus=0)
            found.check_model(tiny_model("mixtral").config)
            with pytest.raises(ValueError, match=rf"trainer.{name} is for models with experts"):
                found.check_model(tiny_model().config)


def test_more_ranks_than_key_value_heads():
    model = tiny_model(vocab_size=44).config
    devices({"tp": 4}).check_model(model)
    other = devices({"tp": 4}, backend="dtensor")
    with pytest.raises(ValueError, match="tp 4 does not divide the model's num_key_value_heads 2"):
        other.check_model(model)


def test_pipelines_are_megatrons():
    assert devices({}).ranked and devices({"pp": 2}).plan.num_ranks == 2
    message = r"pp 2 is for trainer.backend megatron: add --trainer.backend megatron"
    with pytest.raises(ValueError, match=message):
        devices({"pp": 2}, backend="dtensor").check_model(tiny_model().config)


def test_it_says_how_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nemorl.parallel.backends.find_spec", lambda name: None)
    off = BackendConfig()
    with pytest.raises(ValueError, match=r"must be installed.*pip install 'nemorl\[megatron\]'"):
        check_training(off, None, off.parallel, limits)


def test_what_generates_on_the_ranks_of_another_backend():
    generation = nemorl.GenerationConfig(backend="megatron")
    with pytest.raises(ValueError, match=r"generation.backend must be torch or vllm unless the tr"):
        devices({}, backend="dtensor", generation=generation)
    with pytest.raises(ValueError, match=r"that needs no ranks of a trainer"):
        nemorl.evaluate("model", "rows.jsonl", "exact", generation=generation)

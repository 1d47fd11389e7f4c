"""How a run's trainer and engines share GPUs: what is asked for is counted, as there are none."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import CONFIG_MAPPING, GPT2Config, LlamaConfig, Qwen2Config

import nemorl
from nemorl.models.capabilities import TESTED
from nemorl.models.tiny import tiny_config
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.planner.sharing import Sharing, training_of
from nemorl.rollout.generation import GenerationTraits
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run import devices, parts
from nemorl.runtime.run.devices import Devices, Fit, fitted, keeps_reference, sharing_of
from tests.runtime.runs import grpo_config, numbers, sft_config, start
from tests.tiny_models import tiny_model

QWEN_7B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)


LORA = nemorl.LoRAConfig(rank=16)


def found(
    model: Any = QWEN_7B,
    gpus: int = 1,
    *,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """For a run with defaults on GPUs of 80 GB."""
    generation = nemorl.GenerationConfig(backend="vllm", **options.pop("generation", {}))
    given = {"reward": "exact", "generation": generation, **options}
    fit = fit_of(nemorl.GRPOConfig, model, gpus, plan=plan, **given)
    return sharing_of(fit, generation, model, can_offload=True, can_empty=True)


def fit_of(
    kind: Any,
    model: Any = QWEN_7B,
    gpus: int = 1,
    *,
    plan: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **options: Any,
) -> Fit | None:
    plan = {"param_dtype": "bfloat16", **(plan or {})}
    config = kind(parallel=nemorl.ParallelPlan(**plan), **options)
    places = Devices.of(config, environ or {}, num_gpus=gpus)
    engines = config.generation if places.shares_gpus(config.generation) else None
    return fitted(config, places, engines, model, card=80e9)


def test_a_run_of_7b_with_adapters_has_room_on_one_gpu():
    sharing = found(lora=nemorl.LoRAConfig(rank=16, target_modules=("q_proj", "lm_head")))
    assert sharing is not None and not sharing.offloads
    assert sharing.kept == pytest.approx(31e9, rel=0.02) and 0.5 < sharing.share < 0.52


GIVEN_TOKENS = {"trainer": nemorl.TrainerConfig(micro_batch_tokens=4096)}
LONG = {"data": nemorl.DataConfig(max_total_sequence_length=10_000)}
ENGINES = {"generation": nemorl.GenerationConfig(backend="vllm")}
EIGHT = {"gpus": 8, "plan": {"dp_shard": 8}}


@pytest.mark.parametrize(
    ("kind", "options", "tokens", "recomputes"),
    [
        (nemorl.SFTConfig, EIGHT, 4096, "none"),
        (nemorl.SFTConfig, {"lora": LORA}, 2048, "none"),
        (nemorl.SFTConfig, {"lora": LORA, **GIVEN_TOKENS}, 4096, "full"),
        (nemorl.SFTConfig, {"lora": LORA, **LONG}, 16384, "full"),
        (nemorl.DPOConfig, {"lora": LORA}, 16384, "full"),
        (nemorl.DPOConfig, {"lora": LORA, **LONG, **EIGHT}, 20_000, "full"),
        (nemorl.GRPOConfig, {"lora": LORA, "reward": "exact"}, 2048, "none"),
    ],
)
def test_what_nobody_set_is_chosen_so_that_training_fits(
    kind: Any, options: dict[str, Any], tokens: int, recomputes: str
):
    fit = fit_of(kind, **options)
    assert fit is not None and training_of(fit.step) <= 0.9 * 80e9
    assert fit.step.work.trainer.micro_batch_tokens == tokens
    assert fit.step.plan.recomputes == recomputes


def test_the_heads_chunk_is_large_where_there_is_room():
    """None of it where engines share the GPU, or where the user chose."""
    roomy, mine = {"gpus": 64, "plan": {"dp_shard": 64}}, nemorl.TrainerConfig(logprob_chunk=512)
    for kind, options, chunk in (
        (nemorl.SFTConfig, roomy, 4096),
        (nemorl.SFTConfig, {**roomy, "trainer": mine}, 512),
        (nemorl.GRPOConfig, {**roomy, "reward": "exact"} | ENGINES, 1024),
    ):
        assert fit_of(kind, **options).step.work.trainer.chunk == chunk


def test_what_the_user_set_stays():
    """If it does not fit, that is a warning; with nothing set, an error."""
    pair: dict[str, Any] = {"gpus": 2, "plan": {"dp_shard": 2}}
    long = nemorl.DataConfig(max_total_sequence_length=32768)
    said = r"take 82\.0 of each GPU's 80\.0 GB, with parallel\.activation_checkpointing full and mi"
    refused = said + r".*; or lower --data\.max-total-sequence-length, or"
    with pytest.raises(ValueError, match=refused):
        fit_of(nemorl.SFTConfig, **pair, data=long)
    mine = nemorl.TrainerConfig(micro_batch_tokens=32768)
    with pytest.warns(UserWarning, match=said):
        fit = fit_of(nemorl.SFTConfig, **pair, data=long, trainer=mine)
    assert fit.micro_batch_tokens == 32768
    pair["plan"] |= {"activation_checkpointing": "none"}
    with pytest.warns(UserWarning, match=r"with parallel\.activation_checkpointing none and micro"):
        assert fit_of(nemorl.SFTConfig, **pair).step.plan.recomputes == "none"
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.warns(UserWarning, match="of at most 16384 tokens: if memory runs out"):
        fit = fit_of(nemorl.SFTConfig, lora=LORA, environ=ranks)
    assert fit.micro_batch_tokens is None, "machines under torchrun may have other GPUs"


@pytest.mark.parametrize("kind", json.loads(TESTED.read_bytes())["types"])
def test_engines_beside_every_tested_family_get_a_share(kind: str):
    """Never what vLLM would take by itself."""
    sharing = found(tiny_config(CONFIG_MAPPING[kind]()))
    assert sharing is not None and 0.8 < sharing.share < 0.9


def test_a_run_trains_with_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    configs, shown, setup = list[Any](), list[Any](), DTensorBackend.setup

    def watched(self: Any, config: Any) -> None:
        configs.append(config)
        setup(self, config)

    def go(name: str, card: int) -> list[Any]:
        monkeypatch.setattr(parts, "smallest_gpu", lambda launch: card)
        config = sft_config(tmp_path / name, steps=1, trainer=nemorl.TrainerConfig())
        return list(map(numbers, start(config, scale=1.0).history))

    monkeypatch.setattr(devices, "_num_gpus", lambda *_: 1)
    monkeypatch.setattr(DTensorBackend, "setup", watched)
    monkeypatch.setattr(parts, "show", lambda fit, quiet: shown.append(fit))
    roomy = go("roomy", 10**12)
    assert go("tight", int(0.6 * training_of(shown[0].step))) == roomy
    assert [each.trainer.micro_batch_tokens for each in configs] == [None, 8192]
    assert [each.trainer.chunk for each in configs] == [4096, 4096]
    assert "and microbatches of at most 8192 tokens" in str(shown[1])


def test_what_does_not_fit_is_offloaded_where_the_backend_can():
    long = nemorl.DataConfig(max_total_sequence_length=16384)
    sharing = found(gpus=2, plan={"dp_shard": 2}, data=long)
    assert sharing is not None and sharing.offloads and sharing.chosen
    megatron = nemorl.TrainerConfig(backend="megatron")
    said = (
        r"parallel must spread .* each would keep 137\.1 GB of its 80\.0 GB, but it is 1:"
        r" take more devices \(--parallel\.tp or --parallel\.pp\)$"
    )
    with pytest.raises(ValueError, match=said):
        found(gpus=1, trainer=megatron, data=long)
    mine = nemorl.TrainerConfig(offload_during_generation=False)
    assert not found(gpus=2, plan={"dp_shard": 2}, data=long, trainer=mine).offloads


@pytest.mark.parametrize("rank", [0, 16])
def test_a_model_that_no_gpu_holds_is_refused_with_what_helps(rank: int):
    large = Qwen2Config(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80)
    said = ": add --lora.rank 16, --parallel.cpu-offload, or more devices (--parallel.dp-shard)"
    if rank:
        said = ": add --parallel.cpu-offload, or more devices (--parallel.dp-shard)"
    trainer = nemorl.TrainerConfig(offload_during_generation=True)
    with pytest.raises(ValueError, match=re.escape(said) + "$"):
        found(large, lora=nemorl.LoRAConfig(rank=rank), trainer=trainer)


@pytest.mark.slow
def test_references_and_a_share_of_the_users_count():
    four = {"gpus": 4, "plan": {"dp_shard": 4}}
    referenced = found(kl=nemorl.KLConfig(coef=0.1), **four)
    assert referenced.resident - found(**four).resident == pytest.approx(7.6e9, rel=0.01)
    mine = {"engine": {"gpu_memory_utilization": 0.7}}
    sharing = found(generation=mine, **four)
    assert sharing.share == 0.7 and sharing.offloads
    assert not keeps_reference(nemorl.SFTConfig())


@pytest.mark.parametrize(
    ("options", "environ", "gpus", "shared"),
    [
        ({}, {}, 1, True),
        ({"trainer": nemorl.TrainerConfig(device="cpu")}, {}, 1, False),
        ({"generation": {"colocated": False}}, {}, 2, False),
        ({"parallel": nemorl.ParallelPlan(dp_shard=2)}, {}, 2, True),
        ({}, {"RAY_ADDRESS": "auto"}, 1, True),
    ],
)
def test_who_shares(options: dict[str, Any], environ, gpus: int, shared: bool):
    engines = nemorl.GenerationConfig(backend="vllm", **options.pop("generation", {}))
    config = nemorl.GRPOConfig(reward="exact", generation=engines, **options)
    assert Devices.of(config, environ, num_gpus=gpus).shares_gpus(engines) == shared


class InTurns(TorchGenerationBackend):
    """An engine with weights of its own, which says when it is used."""

    traits = GenerationTraits(engines=True, shares_model=False)
    seen: ClassVar[list[Any]] = []
    held: ClassVar[list[int]] = []
    """Bytes of the trainer's parameters when it starts."""

    def __init__(self, *, model: Any, **options: Any) -> None:
        super().__init__(model=tiny_model(scale=2.0), **options)
        self.trained = model.outline

    def setup(self, config: Any) -> None:
        sizes = [each.untyped_storage().nbytes() for each in self.trained.parameters()]
        self.held.append(sum(sizes))
        self.seen += [("start", config.engine)]
        super().setup(config)

    async def update_weights(self, source: Any, **options: Any) -> int:
        self.seen.append("update")
        return await super().update_weights(source, **options)

    def generate(self, *args: Any) -> Any:
        self.seen.append("generate")
        return super().generate(*args)

    def sleep(self) -> None:
        self.seen.append("sleep")
        super().sleep()

    def wake(self) -> None:
        self.seen.append("wake")
        super().wake()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    InTurns.seen = events = []
    nemorl.register_generation_backend("in turns")(InTurns)
    monkeypatch.setattr(devices, "_num_gpus", lambda *_: 1)
    for name in ("empty_cache", "offload", "optim_step"):
        monkeypatch.setattr(DTensorBackend, name, noted(name, events))
    return events


def noted(name: str, events: list[str]) -> Callable[..., Any]:
    call = getattr(DTensorBackend, name)

    def method(self: DTensorBackend, *args: Any, **options: Any) -> Any:
        events.append(name)
        return call(self, *args, **options)

    return method


def go(folder: Path, **trainer: Any) -> nemorl.TrainResult:
    config = grpo_config(
        folder,
        steps=2,
        trainer=nemorl.TrainerConfig(**trainer),
        generation=nemorl.GenerationConfig(backend="in turns", max_new_tokens=4),
    )
    return start(config)


def in_turns(free: str) -> list[str]:
    """A check of the engine's numbers, and two steps."""
    sampled = [free, "wake", "sleep"]
    return ["sleep", *sampled, *[*sampled, "optim_step"] * 2]


def without(events: list[Any], *names: str) -> list[Any]:
    return [event for event in events if event not in names]


def test_what_does_not_fit_is_offloaded(
    seen: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown: list[Sharing] = []
    monkeypatch.setattr(
        parts, "show", lambda found, quiet: shown.extend([found] * isinstance(found, Sharing))
    )
    monkeypatch.setattr(parts, "smallest_gpu", lambda launch: 10**10)
    roomy = go(tmp_path / "roomy")
    assert seen[:2] == ["empty_cache", ("start", {"gpu_memory_utilization": 0.899})]
    assert without(seen[2:], "generate", "update") == in_turns("empty_cache")
    saved = nemorl.load_config(nemorl.GRPOConfig, roomy.paths.config)
    assert saved.trainer.offload_during_generation is None, "another GPU decides anew"
    seen.clear()
    monkeypatch.setattr(parts, "smallest_gpu", lambda launch: int(shown[0].wanted / 0.9))
    tight = go(tmp_path / "tight")
    assert [each.offloads for each in shown] == [False, True]
    assert "empty_cache" not in seen and seen[0] == "offload"
    assert InTurns.held[-2] > 0 and InTurns.held[-1] == 0
    assert without(seen[2:], "generate", "update") == in_turns("offload")
    assert list(map(numbers, roomy.history)) == list(map(numbers, tight.history))


def test_engines_that_do_not_fit_are_refused_before_the_model_is_loaded(
    seen: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "smallest_gpu", lambda launch: 10**9)
    with pytest.raises(ValueError, match=r"generation\.colocated must be false where an engine"):
        go(tmp_path / "run")
    assert not seen


def test_a_model_whose_sizes_are_not_known_leaves_the_share_to_the_engine():
    assert found(None) is None  # it is read, and refused, elsewhere
    message = "sizes of gpt2 or of the GPUs are not known, so engines on the trainer"
    with pytest.warns(UserWarning, match=message):
        assert found(GPT2Config()) is None
    assert found(LlamaConfig(num_hidden_layers=8)) is not None

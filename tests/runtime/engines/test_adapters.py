"""Adapters on their way to vLLM as adapters, without the weights that they adapt."""

from typing import Any

import pytest

from nemorl.models.adapters import adapted_layers
from nemorl.parallel.config import BackendConfig, LoRAConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.lora import adapter_tensors, adapters_off
from nemorl.rollout.calls import blocking
from nemorl.rollout.collect import collect
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.engines.weights import WeightSender, sync_weights
from tests.parallel.batches import nll_loss, random_batch
from tests.rollout.updates import update
from tests.runtime.engines.shared import small_model, vllm_backend
from tests.tiny_models import random_prompts

pytestmark = pytest.mark.xdist_group("ray")
RANKS = {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"o_proj": 16.0}}


def trainer(kind: str, **options: Any) -> DTensorBackend:
    made = DTensorBackend(small_model(kind, scale=2.0))
    config = BackendConfig(
        trainer=TrainerConfig(device="cpu"),
        optimizer=OptimizerConfig(lr=2e-2),
        lora=LoRAConfig(rank=4, alpha=8.0, **options),
        keep_reference=True,
    )
    made.setup(config)
    return made


def gaps(made: DTensorBackend, generator: Any, seed: int) -> tuple[float, float]:
    """How far samples' logprobs are from the trainer's, and from those without adapters."""
    prompts = Prompts([{"prompt": ""}] * 6, random_prompts(6))
    reward = FunctionalRewardWrapper(lambda prompt, response: 0.0)
    sampling = SamplingParams(n=2, max_new_tokens=12)
    batch = collect(generator, reward, prompts, sampling, seed=seed).to_batch()
    found = [made.get_logprobs(batch).values, made.get_reference_logprobs(batch).values]
    mask = batch.loss_mask
    rows = [ids[:end].tolist() for ids, end in zip(batch.input_ids, batch.lengths, strict=True)]
    scored = blocking(generator.score(rows)).token_logprobs
    sampled = batch.generation_logprobs.numpy()
    for scores, own, ours in zip(scored, sampled, mask.numpy(), strict=True):
        assert scores[ours[: len(scores)]] == pytest.approx(own[ours], abs=1e-4)
    own, reference = ((each - batch.generation_logprobs)[mask].abs().max() for each in found)
    return float(own), float(reference)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the weights of each update."""
    names: list[set[str]] = []
    receipt = WeightSender._receipt

    def noted(self: WeightSender, found: Any) -> Any:
        names.append(set(found))
        return receipt(self, found)

    monkeypatch.setattr(WeightSender, "_receipt", noted)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_engine_applies_the_adapters_of_each_update(kind, sent):
    made = trainer(kind, **RANKS)
    generator = vllm_backend(made.model, adapter_rank=8)
    for step in range(3):
        sync_weights(made, generator)
        own, reference = gaps(made, generator, step)
        assert own < 1e-4 and (reference > 0.01) == (step > 0)
        assert generator.metrics()["weights/proved"] == len(sent[-1])
        made.train_step(random_batch([5, 9, 20], seed=step), nll_loss)
    adapters = set(adapter_tensors(made.model))
    bases = {name for name, _ in made.weights()}
    assert sent == [bases | adapters, adapters, adapters], "the base goes once"


@pytest.mark.slow
@pytest.mark.parametrize("adapter_rank", [0, 4], ids=["merged", "apart"])
def test_a_base_in_4_bits_is_sent_as_what_it_stands_for(adapter_rank):
    pytest.importorskip("bitsandbytes")
    made = trainer("llama", quantize="nf4")
    generator = vllm_backend(made.model, adapter_rank=adapter_rank)
    for step in range(2):
        sync_weights(made, generator)
        own, reference = gaps(made, generator, step)
        assert own < 1e-4 and (reference > 0.01) == (step > 0)
        made.train_step(random_batch([5, 9, 20], seed=step), nll_loss)


@pytest.mark.slow
def test_adapters_of_some_layers_and_none():
    """Layers without one get no adapter; weights without adapters are sampled from as they are."""
    made = trainer("llama", target_modules=("v_proj", "layers.1.mlp.up_proj"))
    for step in range(2):
        made.train_step(random_batch([5, 9, 20], seed=step), nll_loss)
    assert len(adapted_layers(made.model)) == 3
    generator = vllm_backend(made.model, adapter_rank=4)
    sync_weights(made, generator)
    assert gaps(made, generator, 0)[0] < 1e-4
    with adapters_off(made.model):
        base = {name: each.clone() for name, each in made.weights(adapters="apart")}
    bases = {name: each for name, each in base.items() if ".lora_" not in name}
    update(generator, bases.items(), version=7)
    own, reference = gaps(made, generator, 1)
    assert own > 0.01 and reference < 1e-4
    with pytest.raises(ValueError, match="is missing"):
        update(generator, (), version=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sleep_level": 2}, "sleep_level must be at most 1 with"),
        ({"weight_transport": "nccl"}, "weight_transport must be object_store with"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=f"generation.{message} generation.adapter_rank"):
        GenerationConfig(backend="vllm", adapter_rank=8, **options)


def test_a_run_needs_room_for_its_adapters():
    generation = GenerationConfig(backend="vllm", adapter_rank=3)
    message = "generation.adapter_rank must be 0 or as large as the largest rank of the adapters"
    with pytest.raises(ValueError, match=message):
        GRPOConfig(generation=generation, lora=LoRAConfig(rank=2, rank_pattern={"q_proj": 4}))

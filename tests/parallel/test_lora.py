"""LoRA in the dtensor backend: training, export, checkpoints, sampling, the reference."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nemorl
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.config import LoRAConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.lora import adapter_tensors
from nemorl.rollout.collect import collect
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.parallel.batches import LENGTHS, nll_loss, random_batch
from tests.parallel.ways import set_up
from tests.rollout.updates import update
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer


def backend(model: nn.Module | None = None, *, lora: Any = None, **options: Any) -> DTensorBackend:
    lora = {"rank": 4, "alpha": 8.0, **(lora or {})}
    return set_up(model or tiny_model(scale=2.0), lora=lora, **options)


def trained(steps: int = 3, **options: Any) -> DTensorBackend:
    made = backend(**options)
    for step in range(steps):
        made.train_step(random_batch(LENGTHS, seed=step), nll_loss)
    return made


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(random_batch([40]).input_ids, use_cache=False).logits


def base_weights(made: DTensorBackend) -> dict[str, Tensor]:
    state = made.model.state_dict()
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if ".lora_" not in name
    }


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(a), dict(b), atol=0, rtol=0)


FULL = {"activation_checkpointing": "full"}


def test_nothing_changes_at_first():
    made, batch = backend(keep_reference=True), random_batch(LENGTHS)
    expected = backend(lora={"rank": 0, "alpha": 32.0}).get_logprobs(batch).values
    assert torch.equal(made.get_logprobs(batch).values, expected)
    made.train_step(batch, nll_loss)
    assert not torch.equal(made.get_logprobs(batch).values, expected)
    assert torch.equal(made.get_reference_logprobs(batch).values, expected)
    assert made._reference is None, "no second model"
    made.train_step(batch, nll_loss)  # and the adapters are on and trainable again
    assert not torch.equal(made.get_logprobs(batch).values, expected)


def test_adapters_come_back_on_after_an_error():
    made = trained(1, keep_reference=True, trainer={"micro_batch_tokens": 30})
    batch = random_batch(LENGTHS)
    before = made.get_logprobs(batch).values
    with pytest.raises(ValueError, match="31"):
        made.get_reference_logprobs(random_batch([31]))
    assert torch.equal(made.get_logprobs(batch).values, before)
    assert all(tensor.requires_grad for tensor in adapter_tensors(made.model).values())


def test_dropout_is_on_in_training_only():
    batch = random_batch(LENGTHS)
    made = trained(2, lora={"dropout": 0.5})
    first, again, without = (each.get_logprobs(batch).values for each in (made, made, trained(2)))
    assert torch.equal(first, again) and not torch.equal(first, without)


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_are_those_of_the_live_model(tied):
    made = trained(model=tiny_model(scale=2.0, tied=tied))
    live = logits(made.model)
    adapters = {name: tensor.clone() for name, tensor in adapter_tensors(made.model).items()}
    exported = dict(made.weights())
    plain = tiny_model(seed=3, tied=tied)
    assert exported.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(exported, strict=False)
    torch.testing.assert_close(logits(plain), live, atol=1e-5, rtol=0)
    assert (live - logits(tiny_model(scale=2.0, tied=tied))).abs().max() > 0.05
    assert torch.equal(logits(made.model), live)
    assert_same(adapter_tensors(made.model), adapters)


def test_the_model_is_handed_back_plain_and_trained():
    model = tiny_model(scale=2.0)
    model.model.norm.weight.requires_grad_(False)
    made = trained(model=model, plan=FULL)
    live = logits(made.model)
    made.shutdown()
    assert list(model.state_dict()) == list(tiny_model().state_dict())
    torch.testing.assert_close(logits(model), live, atol=1e-5, rtol=0)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "model.norm.weight"
    ]
    assert not hasattr(model, "peft_config")
    again = backend(model)  # and can be given new ones
    assert torch.equal(logits(again.model), logits(model))


class Lazy:
    """Tensors that are read one by one; `Weights` keeps those of a bare iterator."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        return self.tensors


def test_the_sampler_shares_the_live_model():
    trainer = backend(keep_reference=True)
    generator = TorchGenerationBackend(model=trainer.model, tokenizer=tiny_tokenizer())
    generator.setup(GenerationConfig())
    prompts = Prompts([{"prompt": ""}] * 6, random_prompts(6))
    reward = FunctionalRewardWrapper(lambda prompt, response: 0.0)
    sampling = SamplingParams(n=2, max_new_tokens=12)
    for step in range(3):
        batch = collect(generator, reward, prompts, sampling, seed=step).to_batch()
        now, reference = (
            (found.values - batch.generation_logprobs)[batch.loss_mask].abs().max()
            for found in (trainer.get_logprobs(batch), trainer.get_reference_logprobs(batch))
        )
        assert now < 1e-5 and (reference > 0.01) == (step > 0)
        trainer.train_step(random_batch([5, 9], seed=step), nll_loss)
        weights = trainer.weights()
        update(generator, Lazy(weights), version=step + 1)
        # It stopped at the first that it shares.
        assert next(weights)[0] == "model.layers.0.self_attn.q_proj.weight"
    assert_same(base_weights(trainer), tiny_model(scale=2.0).state_dict())


def test_a_generator_of_its_own_gets_merged_weights():
    trainer = trained()
    generator = TorchGenerationBackend(model=tiny_model(seed=9))
    generator.setup(nemorl.GenerationConfig())
    update(generator, trainer.weights(), version=1)
    torch.testing.assert_close(logits(generator.model), logits(trainer.model), atol=1e-5, rtol=0)
    adapted = TorchGenerationBackend(model=backend().model)
    adapted.setup(nemorl.GenerationConfig())
    with pytest.raises(ValueError, match="whose model has adapters must share it with the trainer"):
        update(adapted, trainer.weights(), version=1)


def test_a_checkpoint_holds_adapters_alone(tmp_path: Path):
    model = tiny_model(hidden_size=128, intermediate_size=256, scale=2.0)
    made = trained(model=model, lora={"rank": 1})
    made.save_checkpoint(tmp_path / "saved")
    size = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert size < 0.2 * sum(p.numel() * 4 for p in made.model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "qwen3_moe"])
def test_peft_loads_a_checkpoint(kind, tmp_path: Path):
    tiny_model(kind, scale=2.0).save_pretrained(tmp_path / "base")
    made = trained(model=load_causal_lm(str(tmp_path / "base")), lora={"alpha": 6.5})
    made.save_checkpoint(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    found = config["base_model_name_or_path"], config["lora_alpha"], config["r"]
    assert found == (str(tmp_path / "base"), 6.5, 4)
    theirs = PeftModel.from_pretrained(tiny_model(kind, scale=2.0), tmp_path / "saved")
    assert torch.equal(logits(theirs), logits(made.model))
    merged = load_causal_lm(str(tmp_path / "saved"))  # as a model's folder
    assert list(merged.state_dict()) == list(tiny_model(kind).state_dict())
    torch.testing.assert_close(logits(merged), logits(made.model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"differs in .*\(28 in all\).*lora.rank"),
        ({"alpha": 16.0}, r"lora.alpha must be the same as in the checkpoint \(8\), but it is 16"),
        ({"rank": 0, "alpha": 32.0}, "lora.rank must be above 0, as when .*saved was written"),
    ],
)
def test_what_a_checkpoint_must_fit(lora, message, tmp_path: Path):
    trained().save_checkpoint(tmp_path / "saved")
    made = backend(lora=lora)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        made.load_checkpoint(tmp_path / "saved")
    assert_same(made.model.state_dict(), before)
    if not lora.get("rank", 4):
        made.save_checkpoint(tmp_path / "whole")
        with pytest.raises(ValueError, match=r"lora.rank must be 0, as when .*whole was written"):
            backend().load_checkpoint(tmp_path / "whole")


def test_a_base_that_was_trained_in_this_process_is_noticed(tmp_path: Path):
    model = tiny_model(scale=2.0)
    made = trained(model=model)
    made.save_checkpoint(tmp_path / "saved")
    made.shutdown()
    with pytest.raises(ValueError, match="load the initial model of that run again"):
        backend(model).load_checkpoint(tmp_path / "saved")


def test_what_is_refused():
    message = r"lora.target_modules .* but it is 'q_prj': there are down_proj, .* up_proj, v_proj"
    with pytest.raises(ValueError, match=message):
        backend(lora={"target_modules": ("v_proj", "q_prj")})
    # Its adapter would be passed over: logits are computed from the head's weight alone.
    with pytest.raises(ValueError, match="must name linear layers other than the output layer"):
        backend(tiny_model(tied=False), lora={"target_modules": ("lm_head",)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4, "alpha_pattern": {"(": 1.0}}, "lora.alpha_pattern must be a regular expr"),
        ({"alpha": 16.0}, r"lora.alpha needs lora.rank, but it is 16.0: add --lora.rank 16"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**options)


def test_an_adapter_folder_that_cannot_be_used(tmp_path: Path):
    folder = tmp_path / "adapter"
    backend().save_checkpoint(folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    values = json.loads(config.read_text())

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_causal_lm(str(folder))

    refused("must name their base model")
    config.write_text(json.dumps(values | {"base_model_name_or_path": str(tmp_path / "gone")}))
    refused(r"the base model of the adapters in .*adapter must be .*gone' could not be loaded")
    tiny_model(hidden_size=16).save_pretrained(tmp_path / "gone")
    refused(r"must hold adapters to .*gone, but they don't fit")
    tiny_model().save_pretrained(tmp_path / "gone")
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[1:]), weights)  # which PEFT would take, with a warning
    refused(r"they don't fit \(Found missing adapter keys")
    weights.unlink()
    weights.with_suffix(".bin").write_bytes(pickle.dumps(print))
    refused("must hold adapters to")


def test_an_adapter_on_the_hub_is_merged_into_its_base(tmp_path: Path, monkeypatch):
    made = trained()
    made.save_checkpoint(tmp_path / "saved")

    def from_pretrained(name: str, **_: Any) -> tuple[nn.Module, dict[str, set[str]]]:
        model = tiny_model(scale=2.0)
        model.load_adapter(str(tmp_path / "saved"))
        return model, {"missing_keys": set()}

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    found = load_causal_lm("owner/adapter")
    assert list(found.state_dict()) == list(tiny_model().state_dict())
    torch.testing.assert_close(logits(found), logits(made.model), atol=1e-5, rtol=0)
    found.save_pretrained(tmp_path / "whole")  # and transformers has forgotten that there was one
    assert (tmp_path / "whole" / "model.safetensors").exists()

"""Users' own classes as the project's description has them, unchanged and together in one run."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM

import nemorl
from nemorl.runtime.run import registry
from tests.runtime.run.test_small_backends import Small
from tests.runtime.runs import addition_rows, of_phase, saved_model


class Digits(nemorl.EnvironmentInterface):
    def step(
        self, message_log_batch: list[list[dict[str, str]]], metadata: list[dict[str, Any]]
    ) -> nemorl.EnvironmentReturn:
        texts = [log[-1]["content"] for log in message_log_batch]
        rewards = torch.tensor([sum(map(str.isdigit, text)) / 4 for text in texts])
        return nemorl.EnvironmentReturn(
            observations=[],
            metadata=metadata,
            next_stop_strings=[None] * len(texts),
            rewards=rewards,
            terminateds=torch.ones(len(texts)),
            answers=None,
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        return batch, {"mean_digits": float(batch["rewards"].mean())}


class PlainBackend(Small, nemorl.TrainingBackend):
    def setup(self, config: nemorl.BackendConfig) -> None:
        self.model = self.network = AutoModelForCausalLM.from_pretrained(config.model.path)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=config.optimizer.lr)


class Sampler(nemorl.GenerationBackend):
    updates = 0

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model.load())

    def setup(self, config: nemorl.GenerationConfig) -> None:
        self.config = config

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], sampling_params: nemorl.SamplingParams
    ) -> list[dict[str, list[Any]]]:
        found, greedy = [], sampling_params.temperature == 0
        for prompt in prompts:
            ids, logprobs = torch.tensor([prompt]), []
            for _ in range(sampling_params.max_new_tokens):
                logits = self.model(ids).logits[:, -1] / (sampling_params.temperature or 1)
                drawn = logits.argmax(-1) if greedy else Categorical(logits=logits).sample()
                logprobs.append(float(logits.log_softmax(-1)[0, drawn]))
                ids = torch.cat([ids, drawn[None]], 1)
            found.append({"token_ids": ids[0, len(prompt) :].tolist(), "logprobs": logprobs})
        return found

    def update_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        Sampler.updates += 1
        self.model.load_state_dict(state_dict, strict=False)

    def shutdown(self) -> None:
        self.model = None


class Watch(nemorl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        metrics["watched"] = 1.0


class Sums(nemorl.DataModule):
    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        return addition_rows(8)

    def validation_rows(self) -> Sequence[Mapping[str, Any]]:
        return addition_rows(2)


def brief(prompt: str, response: str) -> float:
    return -len(response) / 100


def test_its_six_classes_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for kind in ("TRAINING_BACKENDS", "GENERATION_BACKENDS"):
        monkeypatch.setattr(registry, kind, dict(getattr(registry, kind)))
    nemorl.register_training_backend("plain")(PlainBackend)
    nemorl.register_generation_backend("sampler")(Sampler)
    watch = Watch()
    result = nemorl.train(
        model=saved_model(tmp_path / "model"),
        dataset=Sums(),
        reward_fn=[Digits(), nemorl.FunctionalRewardWrapper(brief)],
        callbacks=[watch],
        trainer=nemorl.TrainerConfig(backend="plain", device="cpu"),
        generation=nemorl.GenerationConfig(backend="sampler", max_new_tokens=2),
        num_prompts_per_step=1,
        num_generations_per_prompt=4,
        max_num_steps=2,
        max_total_sequence_length=32,
        entropy_coef=None,
        lr=0.01,
        run=nemorl.RunConfig(dir=str(tmp_path / "run"), display="none", plots=False, loggers=()),
    )
    assert watch.steps == [1, 2] and Sampler.updates == 3
    (first, last), (validated,) = of_phase(result, "train"), of_phase(result, "validation")
    assert first["watched"] == 1 and "Digits/mean_digits" in validated
    assert last["reward"] == pytest.approx(last["reward/Digits"] + last["reward/brief"])
    assert (tmp_path / "run/checkpoints/step_2/policy/weights.pt").exists()

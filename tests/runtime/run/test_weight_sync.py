"""From trainer to generator: the weights of one step and no other, and the probe that tells whether
they have arrived.
"""

import pytest
import torch

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.run.weight_sync import TrainerWeights, check_agreement, sync_weights
from nemorl.runtime.start import registry
from tests.runtime.runs import addition_rows, grpo_config, sft_config, start
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer

PROMPT = random_prompts(1, seed=4)[0]


@pytest.fixture
def trainer():
    backend = DTensorBackend(tiny_model(scale=3.0))
    backend.setup(BackendConfig(trainer=TrainerConfig(device="cpu")))
    yield backend
    backend.shutdown()


def generator_of(model, precision="float32"):
    backend = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer(), precision=precision)
    backend.setup(GenerationConfig())
    return backend


def test_a_generator_of_another_model_is_found_out_and_agrees_after_a_sync(trainer):
    generator = generator_of(tiny_model(scale=3.0, seed=1))
    with pytest.raises(
        RuntimeError,
        match=r"they differ by \d+\.\d+, where 0.001 would be rounding",
    ):
        check_agreement(trainer, generator, PROMPT, precision="float32")
    trainer.step = 3
    generator.wake()
    sync_weights(trainer, generator)
    assert check_agreement(trainer, generator, PROMPT, precision="float32") < 1e-5
    assert generator.policy_version == 3
    assert (
        1e-5
        < check_agreement(
            trainer, generator_of(trainer.model, "bfloat16"), PROMPT, precision="bfloat16"
        )
        < 0.25
    )


def test_log_probabilities_that_are_no_numbers_do_not_agree(trainer):
    generator = generator_of(tiny_model(scale=3.0))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"they differ by nan"):
        check_agreement(trainer, generator, PROMPT, precision="float32")


def test_weights_can_be_read_again_until_the_next_step_and_not_after_it(trainer):
    weights = TrainerWeights(trainer)
    assert (
        [name for name, _ in weights]
        == [name for name, _ in weights]
        == [name for name, _ in trainer.weights()]
    )
    trainer.step += 1
    with pytest.raises(
        RuntimeError,
        match=r"these are of step 0 and it has done 1: call sync_weights\(\) after every step",
    ):
        list(weights)
    with pytest.raises(RuntimeError, match="these are of step 0 and it has done 1"):
        weights.send(list)


def test_weights_are_sent_from_where_they_are(trainer):
    """Here, unless the trainer has ranks: then rank 0 sends them."""
    sent = TrainerWeights(trainer).send(dict, dtype=torch.bfloat16)
    assert list(sent) == [name for name, _ in trainer.weights()]

    def send_weights(send, *, dtype):
        return send(iter([("a", torch.ones(1, dtype=dtype))]))

    trainer.send_weights = send_weights
    found = TrainerWeights(trainer).send(dict, dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.bfloat16}


class Watched(TorchGenerationBackend):
    """What is asked of a generator, in order."""

    events: list[str]

    def update_weights(self, weights, version) -> None:
        self.events.append(f"weights {version}")
        super().update_weights(weights, version)

    def generate(self, prompts, sampling_params):
        self.events.append("generate")
        return super().generate(prompts, sampling_params)

    def sleep(self) -> None:
        self.events.append("sleep")
        super().sleep()

    def wake(self) -> None:
        self.events.append("wake")
        super().wake()


STEP, STEP_1 = "wake generate sleep", "wake weights_1 generate sleep"


@pytest.mark.parametrize(
    ("make", "loop"),
    [
        (
            grpo_config,
            f"{STEP} {STEP_1} wake weights_2 generate sleep"
            f" {STEP} {STEP_1.replace('1', '3')} wake weights_4 generate sleep",
        ),
        (sft_config, "wake weights_2 generate sleep wake weights_4 generate sleep"),
    ],
)
def test_the_loops_send_weights_when_they_are_needed_and_let_the_generator_sleep_while_they_train(
    tmp_path, monkeypatch, make, loop
):
    """Validated after steps 2 and 4: with the weights of that step, which are not sent again for
    the samples of the next one.
    """
    monkeypatch.setitem(registry.GENERATION_BACKENDS, "watched", Watched)
    monkeypatch.setattr(Watched, "events", [], raising=False)
    config = make(
        tmp_path,
        steps=4,
        run={"val_period": 2},
        generation=GenerationConfig(backend="watched", max_new_tokens=4),
    )
    start(config, validation=addition_rows(4))
    assert (
        " ".join(Watched.events).replace("weights ", "weights_")
        == f"weights_0 generate sleep {loop}"
    )

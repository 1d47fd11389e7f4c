"""From trainer to generator: the weights of one step and no other, and the probe that tells whether they have arrived."""

import pytest
import torch

from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.generation_config import GenerationConfig
from nemorl.runtime.weight_sync import TrainerWeights, check_agreement, sync_weights
from tests.models import random_prompts, tiny_model, tiny_tokenizer

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
    with pytest.raises(RuntimeError, match=r"has -\d+\.\d+ with the trainer and -\d+\.\d+ with the generator, where 0.001 would be rounding"):
        check_agreement(trainer, generator, PROMPT, precision="float32")
    sync_weights(trainer, generator, version=3)
    assert check_agreement(trainer, generator, PROMPT, precision="float32") < 1e-5
    assert generator.policy_version == 3
    assert 1e-5 < check_agreement(trainer, generator_of(trainer.model, "bfloat16"), PROMPT, precision="bfloat16") < 0.25


def test_log_probabilities_that_are_no_numbers_do_not_agree(trainer):
    generator = generator_of(tiny_model(scale=3.0))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"has nan with the trainer"):
        check_agreement(trainer, generator, PROMPT, precision="float32")


def test_weights_can_be_read_again_until_the_next_step_and_not_after_it(trainer):
    weights = TrainerWeights(trainer)
    assert [name for name, _ in weights] == [name for name, _ in weights] == [name for name, _ in trainer.export_weights()]
    trainer.step += 1
    with pytest.raises(RuntimeError, match=r"these are of step 0 and it has done 1: call sync_weights\(\) after every step"):
        list(weights)

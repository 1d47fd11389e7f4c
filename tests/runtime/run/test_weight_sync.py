"""From trainer to generator: the weights of one step and no other, and the probe that tells whether
they have arrived.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from nemorl.data.batch import Example, collate
from nemorl.parallel.backend import as_training_backend
from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.weights import TrainerWeights, check_agreement, sync_weights
from nemorl.runtime.run import registry
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
    message = r"they differ by \d+\.\d+, where 0.001 would be rounding"
    with pytest.raises(RuntimeError, match=message):
        check_agreement(trainer, generator, PROMPT, precision="float32")
    trainer.step = 3
    generator.wake()
    sync_weights(trainer, generator)
    assert check_agreement(trainer, generator, PROMPT, precision="float32") < 1e-5
    assert generator.policy_version == 3
    rounded = generator_of(trainer.model, "bfloat16")
    assert 1e-5 < check_agreement(trainer, rounded, PROMPT, precision="bfloat16") < 0.25


def test_log_probabilities_that_are_no_numbers_do_not_agree(trainer):
    generator = generator_of(tiny_model(scale=3.0))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"they differ by nan"):
        check_agreement(trainer, generator, PROMPT, precision="float32")


def first_number(weights):
    return float(next(iter(weights))[1].flatten()[0])


def test_the_newest_weights_can_be_read_at_any_time_also_after_the_next_step(trainer):
    source = TrainerWeights(trainer)
    names = [name for name, _ in trainer.weights()]
    for version in (0, 1, 5):
        trainer.step = version
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(version)
        for _ in range(2):
            found, weights = source.newest()
            assert (found, [name for name, _ in weights]) == (version, names)
            sent = source.send(lambda found, weights: (found, first_number(weights)))
            assert sent == (version, version)


@pytest.mark.parametrize("read", [0, 1, "all"])
def test_weights_that_change_while_they_are_read_are_an_error(trainer, read):
    """Before the first tensor, in the middle, or after the last: before the reader is done."""
    _, weights = TrainerWeights(trainer).newest()
    for _ in range(sum(1 for _ in trainer.weights()) if read == "all" else read):
        next(weights)
    trainer.step += 1
    match = "the trainer went from step 0 to step 1"
    with pytest.raises(RuntimeError, match=match):
        next(weights)


class Slow:
    """A trainer in the middle of a step: half of its weights are of the next one."""

    def __init__(self) -> None:
        self.step, self.numbers = 0, [0.0, 0.0]
        self.begun, self.go_on = threading.Event(), threading.Event()

    def train_step(self, batch, loss_fn):
        self.numbers[0] += 1
        self.begun.set()
        assert self.go_on.wait(60)
        self.numbers[1] += 1
        self.step += 1

    def weights(self):
        for i, number in enumerate(self.numbers):
            yield f"w{i}", torch.tensor(number)


def test_whichever_thread_reads_it_gets_whole_steps():
    """And a step that begins while a reader sends waits for it."""
    trainer = as_training_backend(slow := Slow())
    mask = [False, True]
    batch = collate([Example(input_ids=[1, 2], loss_mask=mask, response_mask=mask)])
    source = TrainerWeights(trainer)
    sending, sent = threading.Event(), threading.Event()

    def use(version, weights):
        return version, [float(tensor) for _, tensor in weights]

    def slowly(version, weights):
        sending.set()
        assert sent.wait(60)
        return use(version, weights)

    with ThreadPoolExecutor() as threads:
        step = threads.submit(trainer.train_step, batch, print)
        assert slow.begun.wait(60)
        reader = threads.submit(source.send, use)
        assert not wait([reader], 0.2).done
        slow.go_on.set()
        assert reader.result(60) == (1, [1.0, 1.0])
        step.result(60)
        reader = threads.submit(source.send, slowly)
        assert sending.wait(60)
        step = threads.submit(trainer.train_step, batch, print)
        assert not wait([step], 0.2).done
        sent.set()
        assert reader.result(60) == (1, [1.0, 1.0])
        step.result(60)
    assert source.send(use) == (2, [2.0, 2.0])


def test_weights_are_sent_from_where_they_are(trainer):
    """Here, unless the trainer has ranks: then rank 0 sends them."""

    def found(version, weights):
        return version, dict(weights)

    version, sent = TrainerWeights(trainer).send(found, dtype=torch.bfloat16)
    assert (version, list(sent)) == (0, [name for name, _ in trainer.weights()])

    def send_weights(send, *, dtype):
        return send(iter([("a", torch.ones(1, dtype=dtype))]))

    trainer.send_weights, trainer.step = send_weights, 3
    version, sent = TrainerWeights(trainer).send(found, dtype=torch.bfloat16)
    assert (version, sent["a"].dtype) == (3, torch.bfloat16)


def test_weights_are_synced_also_where_an_event_loop_runs(trainer):
    generator = generator_of(tiny_model(scale=3.0, seed=1))

    async def main():
        trainer.step = 2
        sync_weights(trainer, generator)

    asyncio.run(main())
    assert generator.policy_version == 2
    assert check_agreement(trainer, generator, PROMPT, precision="float32") < 1e-5


class Watched(TorchGenerationBackend):
    """What is asked of a generator, in order."""

    events: list[str]

    async def update_weights(self, source) -> int:
        version = await super().update_weights(source)
        self.events.append(f"weights_{version}")
        return version

    def _step(self, new, dropped):
        if new:
            self.events.append("generate")
        super()._step(new, dropped)

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
    assert " ".join(Watched.events) == f"weights_0 generate sleep {loop}"

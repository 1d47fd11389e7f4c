"""Engines with devices of their own: requests live across the trainer's steps."""

import asyncio
import math
import threading
from dataclasses import replace

import pytest

from nemorl.parallel.config import BackendConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.run.weight_sync import TrainerWeights, sync_weights
from tests.parallel.batches import nll_loss, random_batch
from tests.runtime.engines.shared import begin_all, hold, small_model, vllm_backend
from tests.tiny_models import random_prompts

pytestmark = pytest.mark.xdist_group("ray")
PARAMS = SamplingParams(seed=0, max_new_tokens=60, ignore_eos=True)


@pytest.fixture
def trainer():
    backend = DTensorBackend(small_model(scale=3.0))
    trains = TrainerConfig(device="cpu")
    backend.setup(BackendConfig(trainer=trains, optimizer=OptimizerConfig(lr=1e-2)))
    yield backend
    backend.shutdown()


@pytest.mark.slow
def test_a_request_of_one_step_goes_on_through_the_next(trainer):
    """It is in flight while the trainer steps, and ends with the new weights; others begin."""
    generator = vllm_backend(trainer.model, colocated=False)
    sync_weights(trainer, generator)
    engines = [one.actor for one in generator._running.running()]
    hold(engines)

    async def main():
        prompts = random_prompts(8, seed=3)
        tasks = [asyncio.ensure_future(generator.sample(one, PARAMS)) for one in prompts]
        await asyncio.to_thread(begin_all, engines, 8)
        generator.sleep()  # as at the end of run.sampling()
        trainer.train_step(random_batch([5, 9]), nll_loss)
        hold(engines)
        begun = asyncio.ensure_future(generator.sample([5], replace(PARAMS, max_new_tokens=2)))
        await asyncio.to_thread(begin_all, engines, 9)
        (between,) = await begun
        assert set(between.policy_versions) == {0} and not any(task.done() for task in tasks)
        generator.wake()
        sync_weights(trainer, generator)
        hold(engines, math.inf)
        return [completion for (completion,) in await asyncio.gather(*tasks)]

    for completion in asyncio.run(main()):
        assert list(completion.policy_versions) == sorted(completion.policy_versions)
        assert set(completion.policy_versions) == {0, 1}


@pytest.mark.slow
def test_the_event_loop_goes_on_while_weights_travel(trainer):
    generator = vllm_backend(trainer.model, colocated=False)
    turns = []

    class Slow(TrainerWeights):
        def send(self, use, *, dtype=None):
            assert released.wait(60)
            return super().send(use, dtype=dtype)

    released = threading.Event()

    async def main():
        update = asyncio.ensure_future(generator.update_weights(Slow(trainer)))
        for turn in range(20):
            await asyncio.sleep(0.01)
            turns.append(turn)
        assert not update.done()
        released.set()
        return await update

    assert asyncio.run(main()) == trainer.step
    assert len(turns) == 20


@pytest.mark.slow
def test_engines_that_share_devices_sleep():
    generator = vllm_backend(small_model())
    generator.sleep()
    with pytest.raises(RuntimeError, match="sleeps: call wake"):
        generator.generate([[5]], PARAMS)
    generator.wake()

"""Requests between their callers and an engine's steps."""

import asyncio
from typing import Any

from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.schedule import Schedule, Slept, Taken
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.tiny_models import tiny_model, tiny_tokenizer


def test_a_request_that_was_given_up_before_a_step_is_not_recorded() -> None:
    """As one that is drawn again after an update: a replay would wait for it forever."""
    engine = TorchGenerationBackend(model=tiny_model(), tokenizer=tiny_tokenizer())
    engine.setup(GenerationConfig())
    engine.schedule = Schedule(records=True)
    params = [SamplingParams(max_new_tokens=2, seed=seed) for seed in (1, 2)]

    async def give_up_one() -> Any:
        first, second = (asyncio.create_task(engine.sample([5, 6], each)) for each in params)
        await asyncio.sleep(0)  # both have asked
        with engine._scheduler.lock:
            engine.sleep()
        first.cancel()
        await asyncio.wait([first])
        engine.wake()
        return await second

    (completion,) = asyncio.run(give_up_one())
    assert len(completion.token_ids) > 0
    assert engine.schedule.moments == [Slept(0), Taken(0, (2,))]

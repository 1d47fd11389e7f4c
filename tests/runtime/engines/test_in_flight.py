"""Weights that change while real engines have requests in flight."""

import asyncio
import itertools
import math
import os
import signal
from typing import Any

import pytest

from nemorl.models.adapters import merged_tensors
from nemorl.rollout.generation import Completion, SamplingParams, Weights, WeightSource
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from tests.runtime.engines.in_flight import NEW, OLD, PROMPTS, Source, assert_of
from tests.runtime.engines.shared import begin_all, hold, vllm_backend

pytestmark = pytest.mark.xdist_group("ray")
LONG = 40
"""Tokens of a response, which engines that are held do not reach."""


@pytest.fixture
def pair() -> Any:
    """Two replicas with the old weights."""
    backend = vllm_backend(OLD, num_replicas=2, colocated=False, timeout_s=60.0)
    asyncio.run(backend.update_weights(Weights(version=0, tensors=merged_tensors(OLD))))
    yield backend
    backend.shutdown()


def updated(backend: VLLMGenerationBackend, source: WeightSource) -> list[list[Completion]]:
    """The completions of 64 requests, eight for each prompt, in which weights change."""

    async def main() -> list[list[Completion]]:
        asked = list(itertools.product(PROMPTS, range(8)))
        params = [
            SamplingParams(seed=seed, max_new_tokens=LONG, ignore_eos=True) for seed in range(64)
        ]
        engines = [one.actor for one in backend._running.running()]
        hold(engines)
        tasks = [
            asyncio.ensure_future(backend.sample(prompt, each))
            for (prompt, _), each in zip(asked, params, strict=True)
        ]
        await asyncio.to_thread(begin_all, engines, 24)
        assert not any(task.done() for task in tasks)
        backend.sleep()  # nothing: its devices are its own
        assert await backend.update_weights(source) == 1
        hold([one.actor for one in backend._running.running()], math.inf)
        async with asyncio.timeout(120):
            found = await asyncio.gather(*tasks)
        return [[one for (one,) in found[8 * i : 8 * i + 8]] for i in range(len(PROMPTS))]

    return asyncio.run(main())


def check(answers: list[list[Completion]]) -> set[int]:
    """Each token is its version's model's; return how many tokens the old weights sampled."""
    drawn = set()
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for each in completions:
            assert len(each.token_ids) == len(each.policy_versions) == LONG
            assert list(each.policy_versions) == sorted(each.policy_versions)
            old = each.policy_versions.count(0)
            assert_of(OLD, prompt, each, slice(old))
            assert_of(NEW, prompt, each, slice(old, None))
            drawn.add(old)
    return drawn


@pytest.mark.slow
def test_requests_go_on_with_new_weights_as_if_these_had_computed_all_before(pair):
    """The cache of the tokens so far is computed again; nothing of it is left for later requests,
    whose prompts begin with the same blocks.
    """
    drawn = check(updated(pair, Source()))
    assert drawn and 0 < min(drawn) <= max(drawn) < LONG
    later = pair.generate(PROMPTS, SamplingParams(seed=0, max_new_tokens=8, ignore_eos=True))
    for prompt, each in zip(PROMPTS, later, strict=True):
        assert set(each.policy_versions) == {1}
        assert_of(NEW, prompt, each, slice(None))


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_of_an_update_leaves_no_request_open(pair):
    """Its requests begin again with the other, which has the new weights."""
    place = next(one.place for one in pair._running.running() if one.id.rank == 1)
    with pytest.warns(UserWarning, match="replica 1 is started again"):
        answers = updated(pair, Source(lambda: os.kill(place.pid, signal.SIGKILL)))
    drawn = check(answers)
    assert min(drawn) == 0 < max(drawn)  # of those that the dead one had, and of the other's

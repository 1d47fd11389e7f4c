"""What `sample` of every GenerationBackend must do: many requests at once, while weights change."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemorl.rollout.generation import SamplingParams, Weights
from tests.rollout import backends
from tests.rollout.backends import greedy, reference_logprobs
from tests.rollout.updates import update
from tests.runtime.engines.shared import small_model as tiny_model
from tests.tiny_models import random_prompts

make, pytest_generate_tests = backends.make, backends.pytest_generate_tests
PROMPTS = random_prompts(8, seed=3)
PARAMS = [SamplingParams(seed=i, n=1 + i % 3, max_new_tokens=4 + 5 * i) for i in range(8)]
LONG = [SamplingParams(seed=i, max_new_tokens=200 if i else 4) for i in range(8)]
"""All but the first, which ends while the others go on for several steps."""


def begin(backend, prompts=PROMPTS, params=PARAMS):
    return [
        asyncio.ensure_future(backend.sample(*one)) for one in zip(prompts, params, strict=True)
    ]


async def in_the_middle(backend, params=LONG):
    """Requests of which some are unfinished, and the first of which has ended."""
    tasks = begin(backend, PROMPTS, params)
    await tasks[0]
    assert not all(task.done() for task in tasks)
    return tasks


def tokens(answers):
    return [[c.token_ids for c in answer] for answer in answers]


def grouped(completions, params):
    rest = iter(completions)
    return [[next(rest) for _ in range(p.n)] for p in params]


def weights(model):
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def in_flight(backend):
    engines = getattr(backend, "_engines", None)
    scheduler = getattr(backend, "_scheduler", None) or getattr(backend, "scheduler", None)
    return bool(engines._open) if engines else scheduler.busy


def test_the_tokens_are_the_same_whatever_else_is_in_flight(make):
    model, draw = tiny_model(scale=2.0), random.Random(0)
    expected = grouped(make(model).generate(PROMPTS, PARAMS), PARAMS)
    backend = make(model, 4)

    async def later(i):
        await asyncio.sleep(draw.uniform(0, 0.2))
        return await backend.sample(PROMPTS[i], PARAMS[i])

    async def main():
        return await asyncio.gather(*map(later, range(8)))

    for _ in range(3):
        assert tokens(asyncio.run(main())) == tokens(expected)


def test_requests_go_on_with_new_weights_and_each_token_has_its_version(make):
    models = {0: tiny_model(scale=3.0), 7: tiny_model(seed=1, scale=3.0)}
    backend = make(tiny_model(scale=3.0))

    async def main():
        tasks = await in_the_middle(backend)
        assert await backend.update_weights(Weights(version=7, tensors=weights(models[7]))) == 7
        return await asyncio.gather(*tasks)

    completions = [c for (c,) in asyncio.run(main())]
    assert 7 in {version for c in completions for version in c.policy_versions}
    for prompt, c in zip(PROMPTS, completions, strict=True):
        assert len(c.policy_versions) == len(c.token_ids) == len(c.logprobs)
        assert list(c.policy_versions) == sorted(c.policy_versions)
        assert c.policy_version == c.policy_versions[0]
        for version, model in models.items():
            own = torch.tensor(c.policy_versions) == version
            expected = reference_logprobs(model, prompt, c.token_ids, 1.0)[own]
            torch.testing.assert_close(torch.tensor(c.logprobs)[own], expected, atol=1e-4, rtol=0)


def test_requests_finish_with_the_old_weights_first(make):
    backend = make(tiny_model(scale=3.0))
    expected = grouped(backend.generate(PROMPTS, LONG), LONG)

    async def main():
        tasks = await in_the_middle(backend)
        new = Weights(version=7, tensors=weights(tiny_model(seed=1, scale=3.0)))
        await backend.update_weights(new, in_flight="wait")
        after = await backend.sample(PROMPTS[0], LONG[0])
        return await asyncio.gather(*tasks), after

    answers, (after,) = asyncio.run(main())
    assert tokens(answers) == tokens(expected)
    assert {version for (c,) in answers for version in c.policy_versions} == {0}
    assert set(after.policy_versions) == {7}


def test_the_same_weights_in_the_middle_change_no_token(make):
    model = tiny_model(scale=3.0)
    backend = make(model)
    expected = grouped(backend.generate(PROMPTS, LONG), LONG)

    async def main():
        tasks = await in_the_middle(backend)
        await backend.update_weights(Weights(version=1, tensors=weights(model)))
        return await asyncio.gather(*tasks)

    assert tokens(asyncio.run(main())) == tokens(expected)


def test_requests_in_flight_fail_with_an_update_that_fails(make):
    model = tiny_model(scale=3.0)
    backend, sound = make(model), weights(model)

    async def main():
        tasks = await in_the_middle(backend)
        with pytest.raises(ValueError, match="does not fit"):
            wrong = [*sound[:-1], (sound[-1][0], torch.zeros(3))]
            await backend.update_weights(Weights(version=1, tensors=wrong))
        return await asyncio.gather(*tasks, return_exceptions=True)

    failed = [one for one in asyncio.run(main()) if isinstance(one, Exception)]
    assert failed
    assert all("an update of the weights failed while" in str(error) for error in failed)
    update(backend, sound, version=1)
    assert backend.generate([[5]], greedy(3))[0].policy_versions == (1, 1, 1)


def test_a_cancelled_request_makes_room(make):
    backend = make(tiny_model(scale=3.0), 4)
    expected = backend.generate([[5]], greedy(3))

    async def main():
        tasks = await in_the_middle(backend)
        for task in tasks:
            task.cancel()
        # Rounding depends on what else is in the batch.
        assert tokens([await backend.sample([5], greedy(3))]) == tokens([expected])
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(one, asyncio.CancelledError) for one in ended)
        deadline = time.monotonic() + 120
        while in_flight(backend) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not in_flight(backend)

    asyncio.run(main())
    assert backend.generate([[5]], greedy(3)) == expected


def test_after_shutdown_there_is_nothing(make):
    backend = make(tiny_model(scale=3.0))

    async def main():
        tasks = await in_the_middle(backend)
        backend.shutdown()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [one for one in ended if isinstance(one, Exception)]
        assert failed and all("was shut down before it answered" in str(one) for one in failed)
        with pytest.raises(RuntimeError, match=r"after shutdown\(\)"):
            await backend.sample([5], greedy(3))

    asyncio.run(main())
    with pytest.raises(RuntimeError, match=r"after shutdown\(\)"):
        backend.generate([[5]], greedy(3))


def test_two_event_loops_and_a_script_at_once(make):
    model = tiny_model(scale=2.0)
    expected = grouped(make(model).generate(PROMPTS, PARAMS), PARAMS)
    backend = make(model)

    async def main():
        return await asyncio.gather(*begin(backend))

    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(asyncio.run, main()) for _ in range(2)]
        ours = backend.generate(PROMPTS, PARAMS)
        answers = [tokens(other.result()) for other in others]
    assert answers == 2 * [tokens(expected)]
    assert tokens(grouped(ours, PARAMS)) == tokens(expected)


def test_generate_where_an_event_loop_runs(make):
    """As in a notebook; and requests in flight there come through."""
    backend = make(tiny_model(scale=3.0))
    expected = [backend.generate(PROMPTS, params) for params in (LONG, PARAMS)]

    async def main():
        tasks = await in_the_middle(backend)
        blocking = backend.generate(PROMPTS, PARAMS)
        return [c for (c,) in await asyncio.gather(*tasks)], blocking

    found = asyncio.run(main())
    assert tokens(found) == tokens(expected)


def test_requests_in_flight_outlast_a_sleep(make):
    backend = make(tiny_model(scale=3.0))
    expected = grouped(backend.generate(PROMPTS, LONG), LONG)

    async def main():
        tasks = await in_the_middle(backend)
        backend.sleep()
        with pytest.raises(RuntimeError, match="wake"):
            await backend.sample([5], greedy(3))
        backend.wake()
        return await asyncio.gather(*tasks)

    assert tokens(asyncio.run(main())) == tokens(expected)


def test_scores_beside_requests_in_flight(make):
    backend = make(tiny_model(scale=3.0))
    params = [SamplingParams(seed=n, max_new_tokens=n) for n in (4, 90)]
    expected = backend.generate(PROMPTS[:2], params)
    alone = asyncio.run(backend.score(PROMPTS, top_k=2))

    async def main():
        tasks = begin(backend, PROMPTS[:2], params)
        await tasks[0]
        beside = await backend.score(PROMPTS, top_k=2)
        return await asyncio.gather(*tasks), beside

    answers, beside = asyncio.run(main())
    assert tokens(answers) == tokens([[one] for one in expected])
    for name in "token_logprobs", "top_logprobs":
        for a, b in zip(getattr(alone, name), getattr(beside, name), strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_wrong_requests_are_refused_alone(make):
    backend = make(tiny_model(scale=3.0))
    prompts, params = [[5], [42], [6]], [greedy(3)] * 3

    async def main():
        tasks = begin(backend, prompts, params)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, wrong, last = asyncio.run(main())
    assert isinstance(wrong, ValueError) and "prompt 0 has 42" in str(wrong)
    assert [*first, *last] == backend.generate([[5], [6]], greedy(3))


def test_weights_that_are_not_finite_are_the_error_of_every_request(make):
    model = tiny_model(scale=3.0)
    backend, sound = make(model), weights(model)
    broken = [(name, torch.full_like(p, float("nan"))) for name, p in sound]

    async def main():
        tasks = begin(backend, PROMPTS, [greedy(3)] * 8)
        return await asyncio.gather(*tasks, return_exceptions=True)

    expected = asyncio.run(main())
    update(backend, broken, version=1)
    ended = asyncio.run(main())
    assert all(isinstance(one, FloatingPointError) for one in ended)
    update(backend, sound, version=0)
    assert asyncio.run(main()) == expected

"""Classes with few methods as generation backends: `as_generation_backend`."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from nemorl.rollout.generation import Completion, GenerationBackend, SamplingParams, Weights
from nemorl.rollout.wrapped import as_generation_backend
from tests.rollout.backends import reference_logprobs
from tests.rollout.updates import update
from tests.tiny_models import tiny_model, tiny_tokenizer

CONFIG = SimpleNamespace(max_batch_size=4)
PARAMS = SamplingParams(max_new_tokens=4, n=3, seed=1)


class Described:
    """A class as the project's description has it. torch's generator draws its responses."""

    def setup(self, config):
        self.config, self.calls, self.ended = config, [], False

    def generate(self, prompts, sampling_params):
        self.calls.append(len(prompts))
        assert sampling_params.n == 1 and sampling_params.seed is None
        return [self.respond(prompt, sampling_params) for prompt in prompts]

    def respond(self, prompt, params):
        drawn = torch.randint(2, 10, (params.max_new_tokens,)).tolist()
        return {"token_ids": drawn, "logprobs": [-0.5] * len(drawn)}

    def update_weights(self, state_dict):
        self.state = dict(state_dict)

    def shutdown(self):
        self.ended = True


class Derived(Described, GenerationBackend):
    """From the Protocol, too, whose empty methods are not its own."""


def made(cls, **options):
    given = {"model": tiny_model(scale=2.0), "tokenizer": tiny_tokenizer(), **options}
    backend = as_generation_backend(cls)(**given)
    backend.setup(CONFIG)
    return backend


@pytest.mark.parametrize("cls", [Described, Derived])
def test_a_described_class_is_a_whole_backend(cls):
    backend = made(cls)
    assert isinstance(backend, GenerationBackend) and backend.inner.config is CONFIG
    completions = backend.generate([[5, 6], [7]], PARAMS)
    assert [len(c.token_ids) for c in completions] == [4] * 6
    assert len({c.token_ids for c in completions}) > 1
    assert {c.logprobs for c in completions} == {(-0.5,) * 4}
    assert completions[0].text == tiny_tokenizer().decode(completions[0].token_ids)
    assert backend.inner.calls == [4, 2]  # 6 samples, max_batch_size 4
    assert backend.generate([[5, 6], [7]], PARAMS) == completions, "by the seed"
    update(backend, tiny_model(seed=1).named_parameters(), version=3)
    assert set(backend.inner.state) == {name for name, _ in tiny_model().named_parameters()}
    assert backend.generate([[5]], PARAMS)[0].policy_versions == (3,) * 4
    assert backend.metrics() == {}
    backend.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        backend.generate([[5]], PARAMS)
    backend.wake()
    backend.shutdown()
    backend.shutdown()
    assert backend.inner.ended
    with pytest.raises(RuntimeError, match=r"after shutdown\(\)"):
        backend.generate([[5]], PARAMS)


class Scoring(Described):
    async def score(self, token_ids, *, top_k=0, kind=None):
        return "its own"


def test_the_model_scores_where_the_class_does_not():
    model = tiny_model(scale=2.0)
    (found,) = asyncio.run(made(Described, model=model).score([[5, 6, 7]])).token_logprobs
    expected = reference_logprobs(model, [5], (6, 7), 1.0)
    torch.testing.assert_close(torch.from_numpy(found)[1:], expected, atol=1e-5, rtol=0)
    assert asyncio.run(made(Scoring).score([[5, 6]])) == "its own"
    with pytest.raises(ValueError, match="must have the method score"):
        asyncio.run(made(Described, model=None).score([[5]]))
    with pytest.raises(ValueError, match="sequence 0 is empty"):
        asyncio.run(made(Scoring).score([[]]))


def test_the_trainers_generator_is_left_alone():
    backend = made(Described)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    backend.generate([[5]], PARAMS)
    assert torch.equal(torch.rand(1), expected)


def test_requests_that_are_alike_are_one_call():
    backend = made(Described)
    backend.max_batch_size = 100
    other = SamplingParams(max_new_tokens=2, temperature=0.5)

    async def main():
        work = [backend.sample([5, i], PARAMS) for i in range(10)]
        return await asyncio.gather(*work, backend.sample([5], other))

    answers = asyncio.run(main())
    assert [len(answer) for answer in answers] == [3] * 10 + [1]
    assert backend.inner.calls == [30, 1]


def test_requests_that_wait_follow_an_update_or_come_before_it():
    for in_flight, version in (("keep", 5), ("wait", 0)):
        backend = made(Described)

        async def main(backend=backend, in_flight=in_flight):
            tasks = [asyncio.ensure_future(backend.sample([5], PARAMS)) for _ in range(8)]
            await asyncio.sleep(0)
            new = Weights(version=5, tensors=tiny_model().named_parameters())
            assert await backend.update_weights(new, in_flight=in_flight) == 5
            return await asyncio.gather(*tasks)

        answers = asyncio.run(main())
        assert {c.policy_version for answer in answers for c in answer} == {version}
        assert sum(backend.inner.calls) == 24


class Texts(Described):
    def generate(self, prompts: list[str], sampling_params):
        assert all(isinstance(prompt, str) for prompt in prompts)
        return [str(len(prompt)) * sampling_params.max_new_tokens for prompt in prompts]


class Columns(Described):
    def generate(self, prompts, sampling_params):
        tokens = [row["token_ids"] for row in super().generate(prompts, sampling_params)]
        return {"token_ids": tokens, "finish_reason": ["stop"] * len(tokens)}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("cls", [Texts, Columns])
def test_logprobs_that_are_missing_are_the_models(cls, temperature):
    backend = made(cls)
    params = SamplingParams(max_new_tokens=3, temperature=temperature)
    for step in range(2):
        for c in backend.generate([[5, 6, 7]], params):
            assert c.finish_reason == ("stop" if cls is Columns else "length")
            expected = reference_logprobs(
                tiny_model(seed=step, scale=2.0), [5, 6, 7], c.token_ids, temperature or 1.0
            )
            torch.testing.assert_close(torch.tensor(c.logprobs), expected)
        update(backend, tiny_model(seed=1, scale=2.0).named_parameters(), version=1)


def test_an_engine_that_ends_early_where_it_must_not_is_refused():
    prompt, lasting = [[5, 6, 7]], SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)
    assert len(made(Described).generate(prompt, lasting)[0].token_ids) == 4
    with pytest.raises(ValueError, match=r"Columns.generate must have 4 tokens where .*ignore_eos"):
        made(Columns).generate(prompt, lasting)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], r"Wrong.generate must return one response for each of 3 prompts, but it is 0"),
        ([{"ids": [1]}] * 3, r"must return texts, Completions or dicts .*'ids'"),
        ([{"token_ids": [5], "logprobs": []}] * 3, r"must return a logprob for each of 1 tokens"),
    ],
)
def test_what_generate_returns_is_checked(found, message):
    class Wrong(Described):
        def generate(self, prompts, sampling_params):
            return found

    backend = made(Wrong)
    with pytest.raises(ValueError, match=message):
        backend.generate([[5]], PARAMS)


class Sampler:
    """Only the asynchronous verb."""

    policy_version = 0

    def setup(self, config): ...

    async def sample(self, prompt, params):
        await asyncio.sleep(0.01 / prompt[0])
        one = Completion(token_ids=prompt, logprobs=(-1.0,), finish_reason="stop", text="")
        return [one] * params.n

    async def update_weights(self, source, *, in_flight="keep"): ...

    def shutdown(self): ...


def test_an_instance_with_sample_gets_what_it_lacks():
    backend = as_generation_backend(Sampler())
    assert isinstance(backend, Sampler) and isinstance(backend, GenerationBackend)
    apart = type("Apart", (Sampler,), {"sleeps": False})
    assert backend.sleeps and not as_generation_backend(apart).sleeps
    expected = [(5,), (5,), (2,)]
    params = [SamplingParams(n=2), SamplingParams()]
    found = backend.generate([(5,), (2,)], params)
    assert [c.token_ids for c in found] == expected


def test_what_no_backend_can_do_without_is_named():
    class Half:
        def setup(self, config): ...

    missing = r"has no update_weights, shutdown, sample \(or generate\): add"
    with pytest.raises(ValueError, match=missing):
        as_generation_backend(Half)

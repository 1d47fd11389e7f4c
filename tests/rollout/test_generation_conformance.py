"""What every GenerationBackend must do."""

from itertools import chain

import pytest
import torch

from nemorl.losses.logprobs import LogprobKind, filter_logits
from nemorl.rollout.calls import blocking
from nemorl.rollout.generation import GenerationBackend, SamplingParams
from tests.rollout import backends
from tests.rollout.backends import greedy, logprob_bound, of_transformers, reference_logprobs
from tests.rollout.counting import tokens
from tests.rollout.updates import update
from tests.runtime.engines.shared import small_model as tiny_model
from tests.tiny_models import random_prompts, tiny_tokenizer

make, pytest_generate_tests = backends.make, backends.pytest_generate_tests


def score(backend, token_ids, **options):
    return blocking(backend.score(token_ids, **options))


def test_it_keeps_the_protocol(make):
    assert isinstance(make(), GenerationBackend)


def test_greedy_tokens_equal_transformers_generate(make, kind):
    model = tiny_model(kind, scale=3.0)
    prompts = random_prompts(12, seed=1)
    completions = make(model).generate(prompts, greedy(24))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == of_transformers(model, prompt, 24)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_the_sampling_distribution(make, temperature):
    """Greedy ones are the model's own."""
    model = tiny_model(scale=3.0)
    prompts = random_prompts(6, seed=2)
    completions = make(model).generate(
        prompts, SamplingParams(temperature=temperature, max_new_tokens=16, n=3, seed=4)
    )
    for i, completion in enumerate(completions):
        expected = reference_logprobs(
            model, prompts[i // 3], completion.token_ids, temperature or 1.0
        )
        assert len(completion.logprobs) == len(completion.token_ids)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, atol=logprob_bound(temperature), rtol=0
        )


@pytest.mark.parametrize("of", [None, LogprobKind(temperature=0.6, top_k=9, top_p=0.8)])
def test_scores_are_the_models_logprobs(make, of):
    """Of long and short sequences, of given tokens and of the likeliest, best first."""
    model, of_model = tiny_model(scale=3.0), of or LogprobKind()
    sequences = [[5], *random_prompts(12, seed=1), [2, *range(3, 42)] * 6]
    backend, bound = make(model, 8), logprob_bound(of_model.temperature)
    found = score(backend, sequences, top_k=5, kind=of)
    plain = score(backend, sequences, kind=of)
    assert (found.policy_version, plain.top_ids, plain.top_logprobs) == (0, (), ())
    for ids, *of_one in zip(
        sequences,
        found.token_logprobs,
        found.top_ids,
        found.top_logprobs,
        plain.token_logprobs,
        strict=True,
    ):
        own, top_ids, top, alone = map(torch.from_numpy, of_one)
        ids = torch.tensor(ids)
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, :-1].float()
        every = filter_logits(logits, keep=ids[1:], **vars(of_model)).log_softmax(-1)
        expected = every.gather(-1, ids[1:, None])[:, 0]
        for values in (own, alone):
            torch.testing.assert_close(values[1:], expected, atol=bound, rtol=0)
            assert values[0] == 0
        torch.testing.assert_close(top[1:], every.topk(5).values, atol=bound, rtol=0)
        at_ids = every.gather(-1, top_ids[1:].long())
        torch.testing.assert_close(top[1:], at_ids, atol=bound, rtol=0)
        assert (top[0] == -torch.inf).all() and top.shape == top_ids.shape == (len(ids), 5)
        assert [own.dtype, top_ids.dtype] == [torch.float32, torch.int32]


def test_a_seeded_request_does_not_depend_on_the_batch(make):
    """Alone, among others, in a batch that is too small for all, and in another order: the same
    tokens.
    """
    model = tiny_model(scale=2.0)
    prompts = random_prompts(9, seed=3)
    params = [
        SamplingParams(
            seed=100 + i,
            n=1 + i % 3,
            max_new_tokens=5 + 3 * i,
            temperature=1.0 + 0.1 * (i % 2),
            top_p=0.9 if i % 4 == 1 else 1.0,
        )
        for i in range(9)
    ]
    together = tokens(make(model).generate(prompts, params))
    assert tokens(make(model, 4).generate(prompts, params)) == together
    alone = [make(model).generate([one], p) for one, p in zip(prompts, params, strict=True)]
    assert tokens(chain(*alone)) == together
    rest = iter(make(model, 7).generate(prompts[::-1], params[::-1]))
    backwards = [[next(rest) for _ in range(p.n)] for p in params[::-1]]
    assert tokens(chain(*reversed(backwards))) == together


def test_samples_of_a_group_differ_and_seeds_repeat(make):
    backend = make(tiny_model())
    prompt = random_prompts(1)[0]
    first, again, other = (
        tokens(backend.generate([prompt], SamplingParams(n=8, seed=seed, max_new_tokens=10)))
        for seed in (5, 5, 6)
    )
    assert len(set(first)) > 1
    assert again == first != other


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.4}, None),
        ({"min_p": 0.5}, None),
        ({"temperature": 0.05}, None),
    ],
)
def test_filters_keep_to_their_support(make, params, allowed):
    model = tiny_model(scale=2.0)
    prompt = random_prompts(1, seed=6)[0]
    completions = make(model).generate(
        [prompt], SamplingParams(n=64, seed=1, max_new_tokens=1, **params)
    )
    drawn = {c.token_ids[0] for c in completions}
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
    logprobs = filter_logits(logits, **params).log_softmax(-1)
    assert drawn <= set(logprobs.isfinite().nonzero()[:, 0].tolist())
    assert allowed is None or len(drawn) <= allowed
    bound = logprob_bound(params.get("temperature", 1.0))
    for completion in completions[:8]:
        assert completion.logprobs[0] == pytest.approx(
            float(logprobs[completion.token_ids[0]]), abs=bound
        )


def test_sampling_follows_the_distribution(make):
    model = tiny_model(scale=2.0)
    prompt = random_prompts(1, seed=6)[0]
    completions = make(model, 512).generate(
        [prompt], SamplingParams(n=4000, seed=3, max_new_tokens=1)
    )
    drawn = torch.bincount(
        torch.tensor([c.token_ids[0] for c in completions]), minlength=model.config.vocab_size
    ).double() / len(completions)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].double().softmax(-1)
    deviations = (drawn - expected).abs() / (expected * (1 - expected) / len(completions)).sqrt()
    assert deviations.max() < 4.5  # standard errors; of 42 tokens


def test_stop_tokens_end_a_response_and_belong_to_it(make):
    model = tiny_model(scale=3.0)
    prompt = random_prompts(1, seed=9)[0]
    backend = make(model)
    free = backend.generate([prompt], greedy(12))[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped = backend.generate([prompt], greedy(12, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert (free.finish_reason, free.truncated) == ("length", True)


def test_the_end_token_stops(make):
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = (
            30 * model.model.norm.weight
        )  # tied: token 1 is likely everywhere
    completions = make(model).generate(
        random_prompts(4), SamplingParams(n=8, seed=0, max_new_tokens=64)
    )
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert ended
    assert all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in ended)
    end = tiny_tokenizer().decode([1])
    for c in ended:
        assert end not in c.text and c.raw_text.endswith(end)
        assert c.raw_text == tiny_tokenizer().decode(c.token_ids)


def test_an_end_token_that_is_ignored_is_a_token_like_others(make):
    """Drawn from the same distribution, with the same logprob; other stop tokens still end. If not
    ignored, each ends a response, also one that only the generation configuration names.
    """
    model = tiny_model(scale=3.0)
    prompt = random_prompts(1, seed=9)[0]
    free = make(model).generate([prompt], greedy(12))[0]
    model.generation_config.eos_token_id = [1, free.token_ids[4]]
    backend = make(model)
    ended = backend.generate([prompt], greedy(12))[0]
    assert list(ended.token_ids) == of_transformers(model, prompt, 12)
    assert len(ended.token_ids) < 12 and ended.finish_reason == "stop"
    going_on = backend.generate([prompt], greedy(12, ignore_eos=True))[0]
    assert going_on == free and len(free.token_ids) == 12 and going_on.truncated
    stop = next(token for token in free.token_ids if token != free.token_ids[4])
    stopped = backend.generate([prompt], greedy(12, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert (stopped.token_ids[-1], stopped.finish_reason) == (stop, "stop")


def test_stop_strings_end_a_response_and_leave_its_text(make):
    model = tiny_model(scale=3.0)
    prompt = random_prompts(1, seed=9)[0]
    backend = make(model)
    free = backend.generate([prompt], greedy(20))[0]
    stop = free.text[5:8]
    stopped = backend.generate([prompt], greedy(20, stop_strings=("never", stop)))[0]
    at = free.text.index(stop)
    assert stopped.text == free.text[:at]
    assert stopped.token_ids == free.token_ids[: at + len(stop)]  # one token a character
    assert stopped.finish_reason == "stop"


def test_new_weights_change_the_answers_and_the_version(make):
    model, other = tiny_model(scale=3.0), tiny_model(seed=1, scale=3.0)
    backend = make(model)
    prompts, params = random_prompts(3), greedy(10)
    before = backend.generate(prompts, params)
    update(backend, ((name, p.detach().clone()) for name, p in other.named_parameters()), version=7)
    after, scores = backend.generate(prompts, params), score(backend, prompts)
    of_other = make(other)  # engines that tests share serve the last backend alone
    expected = of_other.generate(prompts, params)
    assert {c.policy_version for c in before} == {0}
    assert {c.policy_version for c in after} == {7} == {scores.policy_version}
    expected_scores = score(of_other, prompts).token_logprobs
    for ours, theirs in zip(scores.token_logprobs, expected_scores, strict=True):
        assert ours == pytest.approx(theirs, abs=logprob_bound(1.0))
    assert tokens(after) == tokens(expected) != tokens(before)


def test_nothing_is_generated_after_an_update_that_failed(make):
    model = tiny_model(scale=3.0)
    backend = make(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    prompts, params = random_prompts(2), greedy(4)
    before = backend.generate(prompts, params)
    last = next(reversed(weights))
    with pytest.raises(ValueError, match="does not fit"):
        update(backend, {**weights, last: weights[last][:-1]}.items(), version=1)
    with pytest.raises(RuntimeError, match="call update_weights"):
        backend.generate(prompts, params)
    with pytest.raises(RuntimeError, match="call update_weights"):
        score(backend, prompts)
    update(backend, weights.items(), version=0)
    assert backend.generate(prompts, params) == before


def test_metrics_are_numbers_by_name(make):
    backend = make()
    backend.generate([[2]], SamplingParams(max_new_tokens=2))
    assert all(
        isinstance(name, str) and isinstance(value, float)
        for name, value in backend.metrics().items()
    )


def test_long_and_short_prompts_together(make):
    model = tiny_model(scale=3.0)
    prompts = [[2] * 200, [3], *random_prompts(30), [4] * 150]
    params = greedy(5)
    together = tokens(make(model, 8).generate(prompts, params))
    assert together == [make(model).generate([prompt], params)[0].token_ids for prompt in prompts]


def test_sleeping(make):
    backend = make()
    backend.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        backend.generate([[2]], SamplingParams(max_new_tokens=2))
    with pytest.raises(RuntimeError, match="wake"):
        score(backend, [[2]])
    backend.wake()
    assert len(backend.generate([[2]], SamplingParams(max_new_tokens=2))) == 1


def test_the_models_positions_end_a_response(make):
    completions = make().generate([[2] * 250, [2] * 3], SamplingParams(max_new_tokens=10, seed=0))
    assert [len(c.token_ids) for c in completions] == [6, 10]
    assert completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([[2, 42]], "of the model's 42 tokens, but {} 0 has 42"),
        ([[2, -3]], "of the model's 42 tokens, but {} 0 has -3"),
        ([[2], []], "have at least one token, but {} 1 is empty"),
        ([[2], [2] * 257], "the model's 256 positions, but {} 1 has 257 tokens"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(make, token_ids, message):
    backend = make()
    with pytest.raises(ValueError, match=message.format("prompt")):
        backend.generate(token_ids, SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match=message.format("sequence")):
        score(backend, token_ids)


def test_how_much_may_be_asked_for(make):
    backend = make()
    with pytest.raises(ValueError, match="256 positions, but prompt 0 has 256 tokens"):
        backend.generate([[2] * 256], SamplingParams())
    with pytest.raises(ValueError, match="there are 1 for 2 prompts"):
        backend.generate([[2], [3]], [SamplingParams()])
    assert len(score(backend, [[2] * 256]).token_logprobs[0]) == 256
    assert score(backend, []).token_logprobs == ()
    assert score(backend, [[2]], top_k=42).top_ids[0].shape == (1, 42)
    for top_k in (43, -1):
        with pytest.raises(ValueError, match=f"42 tokens, but it is {top_k}"):
            score(backend, [[2]], top_k=top_k)

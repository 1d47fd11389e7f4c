"""One engine: what it refuses, what a sample depends on, and what errors leave behind."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from nemorl.runtime.engines.engine import EngineStartError, VLLMEngine
from nemorl.runtime.engines.spec import check_arguments
from tests.runtime.engines.shared import (
    CACHE,
    LONG,
    SharedEngine,
    count_preemptions,
    raised,
    shared_actor,
    small_model,
    spec_of,
)
from tests.tiny_models import random_prompts, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")


def refusal(spec: Any) -> str:
    SharedEngine(small_model())  # the first of its process is one that can start
    error = raised(shared_actor().start.remote(spec))
    assert isinstance(error, EngineStartError)
    return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"block_sise": 32}, "unknown argument 'block_sise' in generation.engine; did you mean"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization: Input should be less than or"),
        ({"kv_cache_memory_bytes": 2**50}, "Available memory on node 0"),
        (
            {"enable_chunked_prefill": True},
            "generation.engine's enable_chunked_prefill must be off where there is no GPU",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_engines_own_reason_first(engine, message):
    assert refusal(spec_of(small_model(), engine=engine)).startswith(message)


@pytest.mark.parametrize("name", ["max_num_seqs", "load_format"])
def test_arguments_that_are_not_the_users_name_the_setting(name):
    message = f"generation.engine's {name} must be left to nemorl, but it is 3: "
    with pytest.raises(ValueError, match=message):
        check_arguments({name: 3})


@pytest.mark.slow
def test_a_model_that_vllm_does_not_know_is_refused():
    spec = spec_of(small_model())
    config = {**json.loads(spec.files["config.json"]), "architectures": ["StrangeForCausalLM"]}
    files = {**spec.files, "config.json": json.dumps(config).encode()}
    message = refusal(replace(spec, files=files))
    assert message.startswith("Model architectures ['StrangeForCausalLM'] are not supported")
    assert len(message) < 600


@pytest.mark.slow
def test_another_tokenizer_is_refused(tmp_path):
    other = tiny_tokenizer()
    other.add_tokens(["zz"])
    other.save_pretrained(tmp_path)
    message = refusal(spec_of(small_model(), engine={**CACHE, "tokenizer": str(tmp_path)}))
    assert message.startswith("the engine's tokenizer must have the trainer's tokens")


def test_without_vllm_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = r"vLLM can't be imported .* pip install \"nemorl\[vllm\]\""
    with pytest.raises(EngineStartError, match=message):
        VLLMEngine(spec_of(small_model()))


@pytest.mark.slow
def test_samples_share_the_prefill_of_their_prompt():
    def record(engines):
        llm, seen = engines.engine._llm, {}
        step = llm.step

        def recorded():
            outputs = step()
            seen.update({output.request_id: output.num_cached_tokens for output in outputs})
            return outputs

        llm.step, engines.seen = recorded, seen

    def stop(engines):
        del engines.engine._llm.step
        return engines.seen

    engine = SharedEngine(small_model())
    engine.do(record)
    engine.sample(LONG, n=4)
    cached = engine.do(stop)
    assert sorted(cached.values()) == [0, 96, 96, 96]


@pytest.mark.slow
def test_a_sample_depends_on_its_seed_and_number_alone():
    """vLLM's own n samples draw from seed, seed + 1, …: sample 1 would be sample 0 of the next
    request.
    """
    engine = SharedEngine(small_model())
    four = engine.sample(n=4, seed=7)
    assert engine.sample(n=2, seed=7) == four[:2]
    assert len({sample.token_ids for sample in (*four, *engine.sample(n=4, seed=8))}) == 8


@pytest.mark.slow
def test_a_cache_too_small_for_all_changes_nothing():
    model = small_model(scale=2.0)
    prompts = random_prompts(6, longest=60)
    params = [{"n": 2, "seed": i, "max_new_tokens": 150} for i in range(6)]
    engine = SharedEngine(model)
    expected = [engine.sample(prompt, **p) for prompt, p in zip(prompts, params, strict=True)]
    blocks = 17  # two long sequences and a bit
    small = SharedEngine(model, engine={"kv_cache_memory_bytes": blocks * 2 * 2 * 2 * 32 * 32 * 4})
    small.do(count_preemptions)
    calls = [small.begin(prompt, **p) for prompt, p in zip(prompts, params, strict=True)]
    assert [answer.samples for answer in ray.get(calls)] == expected
    assert small.do(lambda engines: engines.dropped) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_no_token_outside_the_vocabulary_is_sampled(tied):
    """Inside, 42 tokens are 64, and the rest of the output layer is 0."""
    engine = SharedEngine(small_model(tied=tied))
    samples = engine.sample(n=50, max_new_tokens=40, temperature=2.0)
    drawn = {token for sample in samples for token in sample.token_ids}
    assert len(drawn) > 30
    assert max(drawn) < 42


@pytest.mark.slow
def test_a_call_that_is_cancelled_leaves_nothing_and_others_go_on():
    engine = SharedEngine(small_model(scale=3.0))
    expected = engine.sample(n=2)
    long, short = engine.begin(n=3, seed=5, max_new_tokens=240), engine.begin(n=2)
    ray.cancel(long)
    assert ray.get(short).samples == expected
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(long)
    assert engine.do(lambda engines: (len(engines.engine._requests), engines.partial)) == (0, 0)


@pytest.mark.slow
def test_logits_that_are_not_finite_are_found_at_the_first_token_and_leave_nothing():
    model = small_model(scale=3.0)
    engine = SharedEngine(model)
    prompts = [LONG, LONG[3:40], [2]]
    expected = [engine.sample(prompt, max_new_tokens=100) for prompt in prompts]
    engine.give(model, float("nan"))
    before = ray.get(engine.actor.progress.remote())
    calls = [engine.begin(prompt, max_new_tokens=100) for prompt in prompts]
    for call in calls:
        error = raised(call)
        assert isinstance(error, FloatingPointError)
        assert "weights hold NaN or infinity" in str(error)
    assert ray.get(engine.actor.progress.remote()) - before < 20  # and not 100 steps
    assert engine.do(lambda engines: len(engines.engine._requests)) == 0
    engine.give(model)
    assert [engine.sample(prompt, max_new_tokens=100) for prompt in prompts] == expected


@pytest.mark.slow
def test_one_prompt_that_is_not_finite_does_not_change_the_answers_to_others():
    model = small_model(scale=3.0)
    with torch.no_grad():
        model.get_input_embeddings().weight[41] = float("inf")
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(posinf=0.0))
    model.config.tie_word_embeddings = False
    engine = SharedEngine(model)
    expected = engine.sample(LONG)
    assert isinstance(raised(engine.begin([2, 41])), FloatingPointError)
    assert engine.do(lambda engines: engines.engine.partial) == 0
    assert engine.sample(LONG) == expected


@pytest.mark.slow
def test_a_cache_that_cannot_be_emptied_ends_an_update():
    engine = SharedEngine(small_model(scale=3.0))

    def break_cache(engines):
        llm = engines.engine._llm
        llm.reset_prefix_cache, llm.collective_rpc = lambda **_: False, lambda *args: []
        try:
            engines.begin_weights()
            engines.finish_weights(0)
        finally:
            del llm.reset_prefix_cache, llm.collective_rpc

    error = raised(engine.actor.call.remote("apply", break_cache))
    assert "the engine's cache must be empty" in str(error)

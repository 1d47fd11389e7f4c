import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from peft import LoraConfig

from nemorl.losses.logprobs import filter_logits
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.config.base import GenerationConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend, _Live
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.start.devices import Devices
from nemorl.runtime.start.settings import generation_config
from tests.runtime.runs import grpo_config
from tests.tiny_models import random_prompts, tiny_tokenizer
from tests.vllm_engines import CACHE, small_model, vllm_backend

pytestmark = pytest.mark.xdist_group("vllm")


def embedded(model):
    backend = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    backend.setup(GenerationConfig())
    return backend


@pytest.mark.parametrize(
    "filters",
    [
        {"min_p": 0.2, "top_p": 0.7},
        {"min_p": 0.1, "top_p": 0.5, "temperature": 1.7},
        {"top_k": 6, "top_p": 0.6},
        {"top_k": 6, "top_p": 0.6, "min_p": 0.15, "temperature": 0.7},
    ],
)
def test_filters_together_apply_in_the_order_of_filter_logits(filters):
    model = small_model(scale=2.0)
    prompts = random_prompts(8, seed=6)
    completions = vllm_backend(model).generate(
        prompts, SamplingParams(n=32, seed=1, max_new_tokens=1, **filters)
    )
    logits = torch.stack(
        [model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float() for prompt in prompts]
    ).detach()
    expected = filter_logits(logits, **filters).log_softmax(-1).repeat_interleave(32, 0)
    drawn = torch.tensor([c.token_ids for c in completions])
    torch.testing.assert_close(
        torch.tensor([c.logprobs for c in completions]),
        expected.gather(-1, drawn),
        atol=1e-5,
        rtol=0,
    )


def test_stops_end_and_cut_a_response_as_with_the_embedded_engine():
    model = small_model(scale=3.0)
    prompts = random_prompts(12, seed=9)
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    free = embedded(model).generate(prompts, params)
    variants = [{"stop_strings": (free[i].text[9:11], free[i].text[7:9])} for i in range(6)]
    variants += [{"stop_token_ids": (free[i].token_ids[5],)} for i in range(6, 12)]
    mixed = [replace(params, **variant) for variant in variants]
    ours, theirs = (
        vllm_backend(model).generate(prompts, mixed),
        embedded(model).generate(prompts, mixed),
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert replace(mine, logprobs=()) == replace(other, logprobs=())
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert {c.finish_reason for c in ours} == {"stop"}


def test_adapters_are_in_the_weights():
    model = small_model(scale=3.0)
    before = vllm_backend(model).generate(
        random_prompts(4), SamplingParams(temperature=0.0, max_new_tokens=12)
    )
    model.add_adapter(
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    backend = vllm_backend(model)
    after = backend.generate(random_prompts(4), SamplingParams(temperature=0.0, max_new_tokens=12))
    expected = embedded(model).generate(
        random_prompts(4), SamplingParams(temperature=0.0, max_new_tokens=12)
    )
    assert (
        [c.token_ids for c in after]
        == [c.token_ids for c in expected]
        != [c.token_ids for c in before]
    )


def test_in_bfloat16_the_engine_is_the_trainers_to_its_rounding():
    model = small_model(scale=2.0)
    prompt = random_prompts(1)[0]
    completion = vllm_backend(model, precision="bfloat16").generate(
        [prompt], SamplingParams(max_new_tokens=40, seed=0)
    )[0]
    input_ids, drawn = (
        torch.tensor([[*prompt, *completion.token_ids]]),
        torch.tensor(completion.token_ids)[:, None],
    )
    for bfloat16, tolerances in ((True, (0.0, 0.1)), (False, (1e-4, 0.1))):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            logits = model(input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        difference = (
            (logits.log_softmax(-1).gather(-1, drawn)[:, 0] - torch.tensor(completion.logprobs))
            .abs()
            .max()
        )
        assert tolerances[0] <= difference < tolerances[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_generation_leaves_nothing_under_way(error):
    model = small_model(scale=3.0)
    backend = vllm_backend(model)
    prompts, params = random_prompts(5), SamplingParams(seed=3, n=2, max_new_tokens=30)
    expected = backend.generate(prompts, params)
    engine = backend._engines.engine
    steps = iter([engine.step] * 5)

    def step():
        for step in steps:
            return step()
        raise error

    with mock.patch.object(engine, "step", step), pytest.raises(error):
        backend.generate(prompts, params)
    assert engine.unfinished == 0
    assert backend.generate(prompts, params) == expected


def test_a_step_that_was_interrupted_leaves_nothing_in_the_cache():
    backend = vllm_backend(small_model(scale=3.0))
    prompts, params = (
        [[2 + i % 39 for i in range(100)]],
        SamplingParams(temperature=0.0, max_new_tokens=12),
    )
    expected = backend.generate(prompts, params)[0]
    llm = backend._engines.engine._llm
    llm.reset_prefix_cache()
    backend.generate(
        [prompts[0][::-1]], params
    )  # so that there is something else where the cache is now free
    runner = llm.model_executor.driver_worker.worker.model_runner
    with (
        mock.patch.object(runner, "execute_model", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        backend.generate(prompts, params)
    got = backend.generate(prompts, params)[0]
    assert got.token_ids == expected.token_ids
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_weights_that_have_changed_since_are_not_given_again():
    """A replica that comes back would have others than those that have stayed."""
    model = small_model()
    live = _Live(model)
    assert len(list(live)) == len(list(live)) > 0
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(
        RuntimeError,
        match=r"the model has changed since its weights were taken.*call update_weights\(\)",
    ):
        list(live)


def test_replicas_need_ray(monkeypatch):
    for name in ("nemorl.runtime.engines.replicas", "nemorl.runtime.cluster.placement"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ValueError,
        match=(
            r"generation.num_replicas needs Ray, which can't be imported .* pip install"
            r" 'nemorl\[ray\]'"
        ),
    ):
        VLLMGenerationBackend(model=small_model()).setup(
            GenerationConfig(backend="vllm", num_replicas=1)
        )


@pytest.mark.parametrize(("num_replicas", "logs"), [(0, None), (1, "logs")])
def test_replicas_have_their_logs_in_the_runs_folder(tmp_path, num_replicas, logs):
    config = grpo_config(
        tmp_path,
        generation=GenerationConfig(backend="vllm", num_replicas=num_replicas, max_new_tokens=4),
    )
    found = generation_config(config, RunDirectory(tmp_path), Devices.of(config, {}, num_gpus=0))
    assert found == replace(
        config.generation,
        log_dir=logs and str(tmp_path / logs),
        max_model_len=32,
        trainer_gpus=0 if num_replicas else None,
    )


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused_before_the_start(temperature):
    message = f"temperature must be 0 .greedy. or within 0.01 … 2 for vLLM, but it is {temperature}"
    with pytest.raises(ValueError, match=message):
        VLLMGenerationBackend(model=small_model()).setup(
            GenerationConfig(backend="vllm", temperature=temperature)
        )
    with pytest.raises(ValueError, match=message):
        vllm_backend(small_model()).generate([[2]], SamplingParams(temperature=temperature))


def test_several_devices_need_processes_of_their_own():
    with pytest.raises(
        ValueError,
        match=(
            r"generation.tensor_parallel_size needs engines in processes of their own, but it is 2"
        ),
    ):
        VLLMGenerationBackend(model=small_model()).setup(
            GenerationConfig(backend="vllm", tensor_parallel_size=2)
        )


def test_the_longest_sequence_can_be_set():
    backend = vllm_backend(small_model(), max_model_len=64)
    with mock.patch.object(
        backend._engines, "generate", wraps=backend._engines.generate
    ) as generate:
        completions = backend.generate(
            [[2] * 60, [2]], SamplingParams(max_new_tokens=50, temperature=0.0)
        )
    assert [len(c.token_ids) for c in completions] == [4, 50]
    assert [request.params.max_new_tokens for request in generate.call_args.args[0]] == [4, 50]
    with pytest.raises(ValueError, match="64 positions, but prompt 0 has 64 tokens"):
        backend.generate([[2] * 64], SamplingParams())


def test_without_a_tokenizer_there_are_no_stop_strings():
    model = small_model(scale=3.0)
    backend = vllm_backend(model, tokenizer=None)
    completion = backend.generate([[5]], SamplingParams(temperature=0.0, max_new_tokens=4))[0]
    assert completion == replace(
        vllm_backend(model).generate([[5]], SamplingParams(temperature=0.0, max_new_tokens=4))[0],
        text="",
    )
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        backend.generate([[5]], SamplingParams(stop_strings=("a",)))


def test_it_measures_its_speed():
    backend = vllm_backend(small_model())
    backend.metrics()
    backend.generate([[2]], SamplingParams(max_new_tokens=20))
    assert backend.metrics()["tokens_per_second"] > 10
    assert backend.metrics() == {}


def test_it_has_an_engine_from_setup_to_shutdown():
    backend = VLLMGenerationBackend(model=small_model(), tokenizer=tiny_tokenizer())
    with pytest.raises(RuntimeError, match=r"no engine: call setup\(\) first"):
        backend.generate([[2]], SamplingParams())
    backend.setup(GenerationConfig(backend="vllm", engine=CACHE))
    assert backend.generate([[2]], SamplingParams(max_new_tokens=2))
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(RuntimeError, match=r"nothing after shutdown\(\)"):
        backend.generate([[2]], SamplingParams())


def test_it_is_set_up_once_and_says_nothing_past_python(capfd):
    backend = VLLMGenerationBackend(model=small_model(), tokenizer=tiny_tokenizer())
    try:
        backend.setup(GenerationConfig(backend="vllm", engine={"kv_cache_memory_bytes": 2**26}))
        assert capfd.readouterr().err == ""
        with pytest.raises(RuntimeError, match="has its engines already"):
            backend.setup(GenerationConfig(backend="vllm"))
    finally:
        backend.shutdown()

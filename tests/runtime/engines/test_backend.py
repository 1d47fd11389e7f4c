import itertools
import sys
from dataclasses import replace

import pytest
import torch

import nemorl
from nemorl.losses.logprobs import filter_logits
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.routing import Asleep
from nemorl.runtime.run.devices import Devices
from nemorl.runtime.run.launch import generation_config
from nemorl.runtime.store.directory import RunDirectory
from tests.ray_session import ray_cpus
from tests.rollout.backends import logprob_bound
from tests.rollout.updates import update
from tests.runtime.engines.shared import (
    CACHE,
    log_folder,
    shared_replicas,
    small_model,
    vllm_backend,
)
from tests.runtime.runs import grpo_config
from tests.tiny_models import ALPHABET, random_prompts, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")


def embedded(model, tokenizer=None):
    backend = TorchGenerationBackend(model=model, tokenizer=tokenizer or tiny_tokenizer())
    backend.setup(GenerationConfig())
    return backend


def completions_like_embedded(model, prompts, params, tokenizer=None):
    """The completions of an engine, which are those of the embedded one."""
    tokenizer = tokenizer or tiny_tokenizer()
    ours = vllm_backend(model, tokenizer=tokenizer).generate(prompts, params)
    theirs = embedded(model, tokenizer).generate(prompts, params)
    for mine, other in zip(ours, theirs, strict=True):
        assert replace(mine, logprobs=()) == replace(other, logprobs=())
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [
        {"min_p": 0.1, "top_p": 0.5, "temperature": 1.7},
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
        atol=logprob_bound(filters.get("temperature", 1.0)),
        rtol=0,
    )


@pytest.mark.slow
def test_stops_end_and_cut_a_response_as_with_the_embedded_engine():
    model = small_model(scale=3.0)
    prompts = random_prompts(12, seed=9)
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    free = embedded(model).generate(prompts, params)
    variants = [{"stop_strings": (free[i].text[9:11], free[i].text[7:9])} for i in range(6)]
    variants += [{"stop_token_ids": (free[i].token_ids[5],)} for i in range(6, 12)]
    mixed = [replace(params, **variant) for variant in variants]
    found = completions_like_embedded(model, prompts, mixed)
    assert {each.finish_reason for each in found} == {"stop"}


@pytest.mark.slow
def test_stops_with_many_special_tokens_inside_as_with_the_embedded_engine():
    """Each stop is what the model says up to the first letter behind the longest silence."""
    model, tokenizer = small_model(scale=3.0, tied=False), tiny_tokenizer()
    letters = "stuvwxyz"
    tokenizer.add_special_tokens({"extra_special_tokens": sorted({*ALPHABET} - {*letters})})
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    prompts, stops, longest = [], [], 0
    for prompt in random_prompts(24, seed=9):
        (free,) = embedded(model, tokenizer).generate([prompt], params)
        ids = tokenizer.convert_tokens_to_ids([*letters])
        places = [place for place, token in enumerate(free.token_ids) if token in ids]
        silences = [b - a for a, b in itertools.pairwise(places)]
        if silences:
            prompts.append(prompt)
            stops.append(free.text[: silences.index(max(silences)) + 2])
            longest = max(longest, *silences)
    assert longest > 10
    mixed = [replace(params, stop_strings=(stop,)) for stop in stops]
    found = completions_like_embedded(model, prompts, mixed, tokenizer)
    assert {(each.finish_reason, each.text) for each in found} == {("stop", "")}


def test_replicas_need_ray(monkeypatch):
    for name in ("nemorl.runtime.engines.replicas", "nemorl.runtime.workers.cluster"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"backend vllm needs Ray, which can't be imported .* pip install 'nemorl\[ray\]'"
    with pytest.raises(ValueError, match=message):
        VLLMGenerationBackend(model=small_model()).setup(GenerationConfig(backend="vllm"))


def test_replicas_have_their_logs_in_the_runs_folder(tmp_path):
    generation = GenerationConfig(backend="vllm", max_new_tokens=4)
    config = grpo_config(tmp_path, generation=generation)
    found = generation_config(config, RunDirectory(tmp_path), Devices.of(config, {}, num_gpus=0))
    assert found == replace(
        generation, log_dir=str(tmp_path / "logs"), max_model_len=32, trainer_gpus=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused_before_the_start(temperature):
    message = f"temperature must be 0 .greedy. or within 0.01 … 2 for vLLM, but it is {temperature}"
    with pytest.raises(ValueError, match=message):
        VLLMGenerationBackend(model=small_model()).setup(
            GenerationConfig(backend="vllm", temperature=temperature)
        )
    with pytest.raises(ValueError, match=message):
        vllm_backend(small_model()).generate([[2]], SamplingParams(temperature=temperature))


@pytest.mark.slow
def test_the_longest_sequence_can_be_set():
    backend = vllm_backend(small_model(), max_model_len=64)
    params = SamplingParams(max_new_tokens=50, temperature=0.0)
    completions = backend.generate([[2] * 60, [2]], params)
    assert [len(c.token_ids) for c in completions] == [4, 50]
    with pytest.raises(ValueError, match="64 positions, but prompt 0 has 64 tokens"):
        backend.generate([[2] * 64], SamplingParams())


@pytest.mark.slow
def test_weights_that_can_be_read_once_are_kept_for_replicas_that_start_later():
    model = small_model(scale=3.0)
    backend, params = vllm_backend(model), SamplingParams(temperature=0.0, max_new_tokens=4)
    update(backend, ((name, p.detach()) for name, p in model.named_parameters()), version=1)
    expected = backend.generate([[5]], params)
    router = backend._engines._router
    for event in (Asleep(True, emptied=True), Asleep(False)):  # as level 2 does on GPUs
        router.send(event)
    assert not router.state.supplied
    assert backend.generate([[5]], params) == expected


@pytest.mark.slow
def test_commands_load_no_model_for_engines(tmp_path, monkeypatch):
    """They get the weights from the files, and answer as before."""
    model = small_model(scale=2.0)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (ids,) = [tiny_tokenizer()("1+1=")["input_ids"]]
    seed = derive_seed(3, 0)
    params = SamplingParams(max_new_tokens=8, seed=seed)
    (expected,) = vllm_backend(model).generate([ids], params)

    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("nemorl.models.source.load_causal_lm", load)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    ray_cpus()
    settings = {"engine": CACHE, "max_batch_size": 64, "max_new_tokens": 8, "seed": 3}
    with shared_replicas():
        (found,) = nemorl.generate(
            model=str(tmp_path), prompt="1+1=", backend="vllm", log_dir=log_folder(), **settings
        )
    assert found["response"] == expected.text
    assert found["logprob"] == pytest.approx(sum(expected.logprobs), abs=1e-5)

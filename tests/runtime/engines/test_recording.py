"""Samples of real engines have the experts that computed them, which the trainer replays."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
import torch

from nemorl.models.adapters import merged_tensors
from nemorl.models.causal_lm import blocks_of, recorded
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.engine import EngineStartError, VLLMEngine
from tests.ray_session import ray_cpus
from tests.runtime.engines.families import folder_of, model_of, steps
from tests.runtime.engines.shared import (
    CACHE,
    LONG,
    SharedEngine,
    begin_all,
    hold,
    log_folder,
    raised,
    shared_actor,
    shared_mixtures,
    spec_of,
)
from tests.tiny_models import random_prompts, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")
mixture = partial(model_of, "qwen3_moe")


def chosen(model: Any, prompt: Any, sample: Any) -> torch.Tensor:
    """The experts that transformers chooses for all tokens but the last."""
    ids = torch.tensor([[*prompt, *sample.token_ids]])[:, :-1]
    with recorded(blocks_of(model)) as found, torch.no_grad():
        model(ids, use_cache=False)
    return torch.stack(found, 1).sort(-1).values


def assert_chosen(sample: Any, expected: torch.Tensor) -> None:
    experts = torch.as_tensor(np.array(sample.routed_experts))
    assert experts.dtype == torch.int16
    assert experts.sort(-1).values.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "layers"),
    [
        ("mixtral", {}, 2),
        ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, 1),
        ("gpt_oss", {}, 2),
    ],
)
def test_the_experts_of_each_token_are_those_of_transformers(kind, settings, layers):
    """With prompts in common, dense layers among the others, and windows."""
    model = model_of(kind, **settings)
    engine = SharedEngine(model, records_experts=True)
    assert len(blocks_of(model)) == layers
    prompts = [*random_prompts(4, longest=40), LONG, LONG, LONG[:70]]
    calls = [engine.begin(prompt, n=3, seed=i, max_new_tokens=5 + 9 * i)
             for i, prompt in enumerate(prompts)]  # fmt: skip
    for prompt, answer in zip(prompts, ray.get(calls), strict=True):
        for sample in answer.samples:
            assert sample.routed_experts.shape[1] == layers
            assert_chosen(sample, chosen(model, prompt, sample))


@pytest.mark.slow
def test_tokens_that_new_weights_compute_again_keep_their_experts():
    """The tokens behind them have those of the new weights, for all before."""
    old, new = mixture(), mixture(seed=1)
    engine = SharedEngine(old, records_experts=True)
    hold([engine.actor])
    calls = [engine.begin(LONG, n=2, seed=i, max_new_tokens=40) for i in range(3)]
    begin_all([engine.actor], 6)
    engine.sender()(1, merged_tensors(new)).check()
    hold([engine.actor], math.inf)
    for answer in ray.get(calls):
        for sample in answer.samples:
            drawn = sample.policy_versions.count(0)
            first = len(LONG) + drawn - 1  # the token after which the new weights drew the next
            assert 0 < drawn < 40
            parts = chosen(old, LONG, sample)[:first], chosen(new, LONG, sample)[first:]
            assert_chosen(sample, torch.cat(parts))
    (sample,) = engine.sample(LONG)
    assert_chosen(sample, chosen(new, LONG, sample))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("enable_prefix_caching", True),
    ],
)
def test_what_an_engine_can_t_record_is_refused(name, value):
    spec = spec_of(mixture(), records_experts=True)
    spec = replace(spec, engine={**CACHE, name: value})
    error = raised(shared_actor(100).start.remote(spec))
    assert isinstance(error, EngineStartError)
    assert f"{name} must be off with trainer.router_replay" in str(error)


@pytest.mark.slow
def test_replay_closes_the_gap_between_sampler_and_trainer(tmp_path: Path):
    """In bfloat16, in which the routers of both choose other experts for some tokens."""
    folder = folder_of("qwen3_moe", tmp_path / "model")
    with shared_mixtures():
        without, replayed = (
            steps(
                folder,
                tmp_path / f"run-{replay}",
                **{"trainer.router_replay": replay, "parallel.param_dtype": "bfloat16"},
            )[0]
            for replay in (False, True)
        )
    assert replayed["reward"] == without["reward"]  # of the same responses
    assert replayed["gen_kl_error"] < without["gen_kl_error"] / 4
    assert replayed["token_mult_prob_error_max"] < without["token_mult_prob_error_max"]


@pytest.mark.slow
def test_of_several_ranks_one_tells_the_experts():
    model = mixture()
    backend = VLLMGenerationBackend(model=model, tokenizer=tiny_tokenizer(), records_experts=True)
    ray_cpus()
    config = {"engine": CACHE, "max_batch_size": 16, "log_dir": log_folder(), "max_restarts": 0}
    backend.setup(GenerationConfig(backend="vllm", tensor_parallel_size=2, **config))
    found = backend.generate([LONG], SamplingParams(n=2, seed=0, max_new_tokens=9))
    for completion in found:
        assert_chosen(completion, chosen(model, LONG, completion))
    backend.shutdown()


@pytest.mark.slow
def test_a_gpus_engine_returns_them_itself():
    """Of all layers, of which those with experts count."""
    spec = replace(spec_of(mixture(), records_experts=True), vocabulary=None)
    asked, found, unasked, refused = SharedEngine(mixture()).do(partial(as_on_a_gpu, spec=spec))
    assert asked and not unasked
    assert "enable_prefix_caching must be on with trainer.router_replay" in refused
    assert found.dtype == np.int16 and found.tolist() == [[[300], [3]]] * 3


def as_on_a_gpu(engines: Any, *, spec: Any) -> Any:
    """Start an engine around a vLLM that is not there; return what it was asked for, and got."""
    import vllm
    from vllm.platforms import current_platform

    made: list[Any] = []

    class Fake:
        tokenizer = None
        reset_prefix_cache = set_weight_version = abort_request = lambda *args, **options: True
        engine_core = SimpleNamespace(shutdown=lambda: None)

        @classmethod
        def from_engine_args(cls, args: Any) -> Any:
            made.append(args.enable_return_routed_experts)
            return cls()

        def collective_rpc(self, method: Any, args: Any = ()) -> list[Any]:
            return {"nemorl_uuid": [""], "nemorl_expert_layers": [[1, 3]]}.get(method, [])

        def add_request(self, name: str, *args: Any, **options: Any) -> str:
            self.name = name
            return f"{name}-7"

        def step(self) -> list[Any]:
            experts = np.tile(np.array([0, 300, 2, 3], np.uint16)[:, None], (3, 1, 1))
            logprobs = SimpleNamespace(logprobs=[-1.0])
            part = SimpleNamespace(
                token_ids=[5], logprobs=logprobs, cumulative_logprob=-1.0, finish_reason="length",
                weight_versions=(), routed_experts=experts if made[-1] else None,
            )  # fmt: skip
            found = {"request_id": self.name, "outputs": [part], "prompt_logprobs": None}
            return [SimpleNamespace(**found)]

    on_cpu = mock.patch.object(type(current_platform), "is_cpu", lambda self: False)
    with mock.patch.object(vllm, "LLMEngine", Fake), on_cpu:
        engine = VLLMEngine(spec)
        engine.add(0, (5, 6, 7), SamplingParams(seed=0))
        ((sample,),) = engine.step().values()
        engine.shutdown()
        VLLMEngine(replace(spec, records_experts=False)).shutdown()
        with pytest.raises(EngineStartError) as refused:
            VLLMEngine(replace(spec, engine={**CACHE, "enable_prefix_caching": False}))
    return made[0], sample.routed_experts, made[1], str(refused.value)

"""Scores of engines, in ways that the embedded engine has not."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from nemorl.losses.logprobs import LogprobKind, token_logprobs
from nemorl.rollout.calls import blocking
from nemorl.runtime.engines.spec import Scoring
from tests.rollout.backends import logprob_bound
from tests.runtime.engines.in_flight import NEW, OLD, PROMPTS, Source
from tests.runtime.engines.shared import LONG, SharedEngine, small_model, vllm_backend

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]
KIND = LogprobKind(temperature=0.7, top_p=0.9)


def assert_of(model: Any, ids: Any, logprobs: Any, kind: LogprobKind = KIND) -> None:
    ids = torch.tensor([ids])
    with torch.no_grad():
        expected = token_logprobs(model(ids, use_cache=False).logits, ids, kind=kind)[0]
    bound = logprob_bound(kind.temperature)
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=bound, rtol=0)


def test_prompts_are_scored_in_chunks_and_with_few_logits_at_a_time():
    def in_chunks(engines):
        core = engines.engine._llm.engine_core.engine_core
        core.scheduler.scheduler_config.enable_chunked_prefill = True
        core.scheduler.max_num_scheduled_tokens = 24
        engines.engine._llm.collective_rpc(lambda worker: setattr(worker.nemorl_scorer, "rows", 5))

    model = small_model(scale=3.0)
    engine = SharedEngine(model, max_batch_size=9)  # of its own
    engine.do(in_chunks)
    prompts = [LONG[:length] for length in (100, 30, 24, 25, 26, 3)]
    kinds = [KIND, LogprobKind(), KIND, KIND, KIND, LogprobKind()]
    calls = [
        engine.actor.sample.remote(tuple(prompt), Scoring(top_k=i, kind=kind))
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    for prompt, kind, answer in zip(prompts, kinds, ray.get(calls), strict=True):
        assert_of(model, prompt, answer.samples[0].logprobs[:, 0], kind)


def test_vllms_second_runner_scores_like_the_first():
    def scores(engines):
        from nemorl.runtime.engines.receiver import TokenScorer

        table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
        asked: dict[str, Any] = {}
        worker = SimpleNamespace(
            in_progress_prompt_logprobs=asked, add_request=lambda id, *_: asked.update({id: []})
        )
        model = SimpleNamespace(compute_logits=lambda states: table[states])
        TokenScorer(
            SimpleNamespace(prompt_logprobs_worker=worker, model=model, get_model=torch.nn.Module)
        )
        ids = torch.tensor([3, 1, 4, 1, 5])
        extra = {"scoring": Scoring(top_k=2, kind=KIND), "targets": ids[1:]}
        worker.add_request("a", 0, SimpleNamespace(prompt_logprobs=0, extra_args=extra))
        for begin, end in ((0, 3), (0, 2), (2, 4)):  # an update drops the first pass
            batch = SimpleNamespace(
                req_ids=["other", "a"],
                query_start_loc_np=[0, 1, 1 + end - begin],
                num_computed_prefill_tokens_np=[0, begin],
            )
            states = torch.cat([ids[:1], ids[begin:end]])
            found = worker.compute_prompt_logprobs(None, states, batch)
            assert bool(found) == (end == 4)
        return table[ids[None]], ids[None], found["a"]

    logits, ids, found = SharedEngine(small_model()).do(scores)
    expected = token_logprobs(logits, ids, kind=KIND)[0, 1:]
    torch.testing.assert_close(found.logprobs[:, 0], expected)
    assert found.logprob_token_ids[:, 1].tolist() == logits[0, :-1].argmax(-1).tolist()


def test_scores_of_a_call_are_of_the_same_weights(monkeypatch):
    """An update comes when half of them are there."""
    backend = vllm_backend(OLD)
    answers = backend._running.answers

    async def interrupted(asked):
        first = await answers(asked[:4])
        if backend.policy_version == 0:
            await backend.update_weights(Source())
        return [*first, *await answers(asked[4:])]

    monkeypatch.setattr(backend._running, "answers", interrupted)
    found = blocking(backend.score(PROMPTS, kind=KIND))
    assert found.policy_version == 1
    for prompt, logprobs in zip(PROMPTS, found.token_logprobs, strict=True):
        assert_of(NEW, prompt, logprobs)

"""Plans that the conformance suite of generation does not run, against engines of one process."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.generation import Completion, SamplingParams
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.saved import exported
from tests.parallel.ways import answers, set_up
from tests.ranks import run_ranks
from tests.rollout.backends import (
    greedy,
    of_transformers,
    reference_logprobs,
    torch_backend,
)
from tests.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts(9, seed=3)
PARAMS = [
    SamplingParams(
        seed=100 + i,
        n=1 + i % 3,
        max_new_tokens=5 + 3 * i,
        top_p=0.9 if i % 4 == 1 else 1.0,
        temperature=float(i % 5 > 0),
    )
    for i in range(9)
]
PLANS = {
    "tp": ParallelPlan(dp_shard=1, tp=2),
    "tp, whole sequences": ParallelPlan(dp_shard=1, tp=2, sequence_parallel=False),
    "dp": ParallelPlan(dp_shard=2),
    "cp": ParallelPlan(dp_shard=1, cp=2, cp_method="allgather"),
    "tp above the key-value heads": ParallelPlan(dp_shard=1, tp=4),
    "interleaved stages": ParallelPlan(dp_shard=1, pp=2, vpp=2),
    "unequal stages": ParallelPlan(dp_shard=1, pp=2, num_layers_in_first_pipeline_stage=3),
    "all": ParallelPlan(dp_shard=1, tp=2, pp=2, cp=2, cp_method="allgather"),
}


def started(folder: Path, plan: ParallelPlan, **options: Any) -> MegatronBackend:
    backend = set_up(None, folder, trainer=options, plan=asdict(plan), make=MegatronBackend)
    backend.open_engine(max_batch_size=8, max_positions=256, end_tokens=[1])
    return backend


def sampled(folder: Path, plan: ParallelPlan) -> list[Completion]:
    backend = started(folder, plan)
    backend.get_logprobs(random_batch([9, 2, 30, 17], seed=0))
    return answers(backend, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "tp")) for n in PLANS]
)
def test_every_plan_gives_the_tokens_of_the_embedded_engine(name: str, tmp_path: Path):
    model, plan = tiny_model(scale=2.0, vocab_size=44, num_hidden_layers=4), PLANS[name]
    model.save_pretrained(tmp_path)
    expected = torch_backend(model, 8).generate(PROMPTS, PARAMS)
    found = run_ranks(plan.num_ranks, sampled, tmp_path, plan)[0]
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.finish_reason == other.finish_reason


OTHERS: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}]


def trained(folder: Path, plan: ParallelPlan) -> list[list[Completion]]:
    backend, params = started(folder, plan), [greedy(12, seed=0)] * len(PROMPTS)
    before = answers(backend, PROMPTS, params)
    backend.train_step(random_batch([9, 2, 30, 17], seed=0), nll_loss)
    backend.save_checkpoint(folder / "after")
    return [before, answers(backend, PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ParallelPlan(dp_shard=2, ep=2, **each) for each in OTHERS])
def test_experts_of_other_ranks(plan: ParallelPlan, tmp_path: Path):
    tiny_model("qwen3_moe", scale=3.0).save_pretrained(tmp_path)
    before, after = run_ranks(plan.num_ranks, trained, tmp_path, plan)[0]
    for folder, found in ((tmp_path, before), (exported(tmp_path / "after"), after)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for prompt, completion in zip(PROMPTS, found, strict=True):
            assert list(completion.token_ids) == of_transformers(model, prompt, 12)
            expected = reference_logprobs(model, prompt, completion.token_ids, 1.0)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert before != after


def recorded(folder: Path, plan: ParallelPlan) -> list[Completion]:
    backend = started(folder, plan, router_replay=True)
    params = [SamplingParams(n=2, seed=i, max_new_tokens=3 + i) for i in range(9)]
    return answers(backend, PROMPTS, params, anew=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp_shard=2, ep=2),
        ParallelPlan(dp_shard=1, tp=2, pp=2),
        ParallelPlan(dp_shard=1, pp=2, vpp=2),
    ],
)
def test_the_experts_of_each_token_are_recorded(plan: ParallelPlan, tmp_path: Path):
    model = tiny_model("qwen3_moe", scale=3.0, num_hidden_layers=5)
    model.save_pretrained(tmp_path)
    found = run_ranks(plan.num_ranks, recorded, tmp_path, plan)[0]
    for index, completion in enumerate(found):
        ids = torch.tensor([[*PROMPTS[index // 2], *completion.token_ids]])[:, :-1]
        logits = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([each.topk(2, -1).indices for each in logits], 1)
        assert completion.routed_experts.dtype == torch.int16
        assert completion.routed_experts.sort(-1).values.tolist() == (
            expected.sort(-1).values.tolist()
        )

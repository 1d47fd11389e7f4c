"""The loss that balances experts is Hugging Face's of the whole batch, wherever tokens are."""

from functools import partial
from pathlib import Path

import pytest

from nemorl.parallel.plan import ParallelPlan
from tests.parallel.balance import (
    BATCH,
    LAYOUTS,
    assert_it_balances,
    assert_same,
    sampled,
    steps,
    written,
)
from tests.ranks import run_ranks

Plan = partial(ParallelPlan, dp_shard=1)
PLANS = {
    "EP 2": ("mixtral", Plan(dp_shard=2, ep=2), {}),
    "TP 2": ("qwen3_moe", Plan(tp=2), {}),
    "TP 2, EP 2": ("qwen3_moe", Plan(tp=2, ep=2), {}),
    "PP 2": ("qwen3_moe", Plan(pp=2, activation_checkpointing="full"), {}),
    "CP 2": ("qwen3_moe", Plan(cp=2), {}),
    "EP 2, PP 2": ("qwen3_moe", Plan(dp_shard=2, ep=2, pp=2), {"norm_topk_prob": False}),
    "PP 2, VPP 2": ("mixtral", Plan(pp=2, vpp=2), {"num_hidden_layers": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_gradient_is_hugging_faces(name: str, tmp_path: Path):
    kind, plan, options = PLANS[name]
    model = written(kind, tmp_path, **options)
    assert_same(model, BATCH, run_ranks(plan.num_ranks, steps, tmp_path, plan, BATCH, LAYOUTS))
    assert_it_balances(model)


@pytest.mark.slow
def test_the_load_is_of_the_experts_that_routers_choose_themselves(tmp_path: Path):
    model = written("qwen3_moe", tmp_path)
    batch = sampled(model, BATCH)
    plan, layouts = ParallelPlan(dp_shard=2, ep=2), [{"router_replay": True}]
    assert_same(model, batch, run_ranks(2, steps, tmp_path, plan, batch, layouts))

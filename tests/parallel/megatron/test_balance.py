"""The loss that balances experts is Hugging Face's of the whole batch, wherever tokens are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.balance import (
    BATCH,
    COEF,
    LAYOUTS,
    assert_same,
    expected,
    sampled,
    steps,
    written,
)
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.megatron.test_backend import start
from tests.ranks import run_ranks

PLANS = [
    pytest.param("mixtral", ParallelPlan(dp_shard=2, ep=2), {}, id="EP 2"),
    *(
        pytest.param("qwen3_moe", plan, {}, id=name, marks=pytest.mark.slow)
        for name, plan in (
            ("TP 2", ParallelPlan(dp_shard=1, tp=2)),
            ("TP 2, EP 2", ParallelPlan(dp_shard=1, tp=2, ep=2)),
            ("PP 2", ParallelPlan(dp_shard=1, pp=2, activation_checkpointing="full")),
            ("CP 2", ParallelPlan(dp_shard=1, cp=2)),
        )
    ),
    pytest.param(
        "qwen3_moe",
        ParallelPlan(dp_shard=2, ep=2, pp=2),
        {"norm_topk_prob": False},
        id="EP 2, PP 2",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "mixtral",
        ParallelPlan(dp_shard=1, pp=2, vpp=2),
        {"num_hidden_layers": 4},
        id="PP 2, VPP 2",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("kind", "plan", "options"), PLANS)
def test_the_gradient_is_hugging_faces(
    kind: str, plan: ParallelPlan, options: dict, tmp_path: Path
):
    model = written(kind, tmp_path, **options)
    assert_same(model, BATCH, run_ranks(plan.num_ranks, steps, tmp_path, plan, BATCH, LAYOUTS))
    balanced = expected(model, BATCH)[2]
    model.router_aux_loss_coef = 0.0
    plain = expected(model, BATCH)[2]
    assert max((balanced[name] - plain[name]).abs().max() for name in plain) > 1e-3


@pytest.mark.slow
def test_the_load_is_of_the_experts_that_routers_choose_themselves(tmp_path: Path):
    """Where the sampler's are trained, the model balances its own choice; others' tokens come after
    these, which replay changes.
    """
    model = written("qwen3_moe", tmp_path)
    batch = sampled(model, BATCH)
    plan, layouts = ParallelPlan(dp_shard=2, ep=2), [{"router_replay": True}]
    assert_same(model, batch, run_ranks(2, steps, tmp_path, plan, batch, layouts))


def in_two_parts(folder: Path) -> None:
    trainer = TrainerConfig(device="cpu", router_aux_loss_coef=COEF)
    backend = start("ep 2", folder, trainer=trainer)
    backend.forward_backward(BATCH, nll_loss)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef must be 0 where gradients of sev"):
        backend.forward_backward(BATCH, nll_loss)
    backend.shutdown()


@pytest.mark.slow
def test_gradients_of_several_batches_are_refused(tmp_path: Path):
    written("mixtral", tmp_path)
    run_ranks(2, in_two_parts, tmp_path)


def logits_of(folder: Path, lengths: list[int]) -> Tensor:
    """`[layers, seq, batch, experts]`."""
    trainer, found = TrainerConfig(device="cpu", share_prompts=False), []
    backend: Any = start("ep 2", folder, trainer=trainer, parallel=ParallelPlan(dp_shard=1, pp=2))
    for layer in backend._stages[0].decoder.layers:
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda hidden, of=gating: (found.append(of(hidden)), found[-1])[1]
    backend.get_logprobs(random_batch(lengths))
    backend.shutdown()
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_logits_are_hugging_faces(kind: str, tmp_path: Path):
    model, lengths = written(kind, tmp_path).eval(), [9, 2, 30, 17]
    batch, found = random_batch(lengths), torch.cat(run_ranks(2, logits_of, tmp_path, lengths))
    for row, length in enumerate(lengths):
        ids = batch.input_ids[row : row + 1, :length]
        with torch.no_grad():
            output: Any = model(ids, output_router_logits=True, use_cache=False)
        torch.testing.assert_close(
            found[:, :length, row], torch.stack(output.router_logits), atol=5e-6, rtol=1e-6
        )

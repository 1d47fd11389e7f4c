"""The loss that balances experts is Hugging Face's of the whole batch, wherever tokens are."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.models.stored import as_stored, stored_names
from nemorl.parallel.config import OptimizerConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.megatron.test_backend import start
from tests.parallel.parity.golden import draw_experts
from tests.parallel.parity.reference import forced
from tests.parallel.parity.worker import gradients_of
from tests.parallel.test_tokens import grouped
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

COEF = 0.3
BATCH = grouped([(13, [3, 5, 4, 4]), (1, [1]), (6, [17, 2])])
"""Prompts that are computed once count as often as they are there."""
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"share_prompts": False},
    {"sequence_packing": True, "packed_row_tokens": 40},
    {"train_micro_batch_size": 1},
]
Found = tuple[dict[str, float], dict[str, Tensor]]


def steps(
    folder: Path, plan: ParallelPlan, batch: TokenBatch, layouts: list[dict[str, Any]]
) -> list[Found]:
    """Metrics and gradients of a first step, in every layout."""
    found = []
    for layout in layouts:
        trainer = TrainerConfig(device="cpu", router_aux_loss_coef=COEF, **layout)
        optimizer, gradients = OptimizerConfig(max_grad_norm=None), dict[str, Tensor]()
        backend: Any = start("ep 2", folder, trainer=trainer, optimizer=optimizer, parallel=plan)
        adamw = backend.optimizer.parts[0].optimizer
        adamw.register_step_pre_hook(
            lambda *_, to=gradients, of=backend: to.update(gradients_of(of))
        )
        found.append((finalize(backend.train_step(batch, nll_loss)), gradients))
        backend.shutdown()
    return found


def expected(model: Any, batch: TokenBatch) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, its balancing part and gradient, as Hugging Face computes them."""
    model.train().zero_grad()
    output = model(
        batch.input_ids,
        attention_mask=(batch.segment_ids > 0).long(),
        labels=torch.where(batch.loss_mask, batch.input_ids, -100),
        output_router_logits=True,
    )
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    stored = dict(as_stored(gradients.items(), stored_names(model)))
    return float(output.loss.detach()), float(output.aux_loss.detach()), stored


def written(kind: str, folder: Path, **options: Any) -> nn.Module:
    model = tiny_model(kind, scale=2.0, router_aux_loss_coef=COEF, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(8.0)  # so that experts are used unequally
    model.save_pretrained(folder)
    return model


def assert_same(model: Any, batch: TokenBatch, of_ranks: list[list[Found]]) -> None:
    loss, balance, gradients = expected(model, batch)
    for found in of_ranks:
        for metrics, own in found:
            assert metrics["router_aux_loss"] == pytest.approx(balance, abs=2e-6)
            assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
            torch.testing.assert_close(own, gradients, atol=2e-6, rtol=0)


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
    model, generator = written("qwen3_moe", tmp_path), torch.Generator().manual_seed(0)
    width = BATCH.input_ids.shape[1]
    rows = [draw_experts(width, model.config, generator) for _ in range(len(BATCH))]
    batch = replace(BATCH, routed_experts=torch.stack(rows).to(torch.int16))
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    for layer, router in enumerate(routers):
        router.register_forward_hook(
            partial(forced, batch.routed_experts[:, :, layer].flatten(0, 1))
        )
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

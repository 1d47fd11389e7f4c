"""Losses that balance experts, as Hugging Face has them, and batches for them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.models.tensor_files import as_stored, stored_names
from nemorl.parallel.config import OptimizerConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import grouped, nll_loss
from tests.parallel.parity.golden import draw_experts
from tests.parallel.parity.reference import forced
from tests.parallel.parity.worker import gradients_of
from tests.parallel.ways import start
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
    folder: Path,
    plan: ParallelPlan,
    batch: TokenBatch,
    layouts: list[dict[str, Any]],
    way: str = "ep 2",
) -> list[Found]:
    found = []
    for layout in layouts:
        trainer = TrainerConfig(device="cpu", router_aux_loss_coef=COEF, **layout)
        optimizer, gradients = OptimizerConfig(max_grad_norm=None), dict[str, Tensor]()
        backend: Any = start(way, folder, trainer=trainer, optimizer=optimizer, parallel=plan)
        adamw = backend.optimizer.parts[0]
        getattr(adamw, "optimizer", adamw).register_step_pre_hook(
            lambda *_, to=gradients, of=backend: to.update(gradients_of(of))
        )
        found.append((finalize(backend.train_step(batch, nll_loss)), gradients))
        backend.shutdown()
    return found


def expected(model: Any, batch: TokenBatch) -> tuple[float, float, dict[str, Tensor]]:
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


def assert_same(
    model: Any, batch: TokenBatch, of_ranks: list[list[Found]], rtol: float = 0.0
) -> None:
    loss, balance, gradients = expected(model, batch)
    for found in of_ranks:
        for metrics, own in found:
            assert metrics["router_aux_loss"] == pytest.approx(balance, abs=2e-6)
            assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
            torch.testing.assert_close(own, gradients, atol=2e-6, rtol=rtol)


def assert_it_balances(model: Any) -> None:
    balanced = expected(model, BATCH)[2]
    model.router_aux_loss_coef = 0.0
    plain = expected(model, BATCH)[2]
    assert max((balanced[name] - plain[name]).abs().max() for name in plain) > 1e-3


def sampled(model: Any, batch: TokenBatch, weigh: Any = forced) -> TokenBatch:
    generator, width = torch.Generator().manual_seed(0), batch.input_ids.shape[1]
    rows = [draw_experts(width, model.config, generator) for _ in range(len(batch))]
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    experts = torch.stack(rows)[:, :, : len(routers)].to(torch.int16)
    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(weigh, experts[:, :, layer].flatten(0, 1)))
    return replace(batch, routed_experts=experts)

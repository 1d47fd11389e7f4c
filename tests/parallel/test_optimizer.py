"""AdamW by either implementation, on plain tensors and on shards; learning rates."""

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from nemorl.parallel.config import OptimizerConfig
from nemorl.parallel.dtensor.optimizers import make_optimizer
from nemorl.parallel.optimizer import learning_rate

IMPLEMENTATIONS = ("fused", "foreach")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def config(implementation: str) -> OptimizerConfig:
    return OptimizerConfig(implementation=implementation, weight_decay=0.1, lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        optimizer.zero_grad()
        (model(inputs) ** 2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_implementation_asked_for_and_the_formula(implementation):
    model, by_hand = small_model(), small_model()
    optimizer = make_optimizer(model, config(implementation))
    assert {(group["fused"], group["foreach"]) for group in optimizer.param_groups} == {
        (implementation == "fused", implementation == "foreach")
    }
    steps(model, optimizer, 1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    (by_hand(inputs) ** 2).mean().backward()
    for ours, parameter in zip(model.parameters(), by_hand.parameters(), strict=True):
        grad, decay = parameter.grad, 0.1 if parameter.ndim == 2 else 0.0
        # The first step: both means are the gradient's own.
        expected = parameter * (1 - 1e-2 * decay) - 1e-2 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def rates_of_transformers(schedule: str, *, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kwargs = {"min_lr_rate": 0.1} if "min_lr" in schedule else {}
    scheduler = get_scheduler(schedule, optimizer, warmup, total, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(total + 1):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("total", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine_with_min_lr"])
def test_schedules_are_those_of_transformers(schedule, total):
    for warmup in range(total + 1):
        config = OptimizerConfig(
            lr=1.0,
            schedule="linear" if schedule == "linear" else "cosine",
            warmup_steps=warmup,
            min_lr_ratio=0.1 if "min_lr" in schedule else 0.0,
        )
        ours = [learning_rate(step, config, total_steps=total) for step in range(total)]
        theirs = rates_of_transformers(schedule, warmup=warmup, total=total)
        rising = rates_of_transformers("constant_with_warmup", warmup=warmup, total=total)
        assert ours == pytest.approx([*rising[1 : warmup + 1], *theirs[warmup:total]], abs=1e-12)
        assert min(ours) > 0  # the last step trains, too

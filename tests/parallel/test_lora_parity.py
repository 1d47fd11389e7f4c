"""A whole run with adapters against PEFT's own: initial values, losses, gradients, weights."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.parallel.dtensor.lora import adapter_tensors
from tests.parallel.batches import LENGTHS, nll_loss, random_batch
from tests.parallel.ways import set_up
from tests.tiny_models import tiny_model

STEPS = 6
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\..*": 2},
    "alpha_pattern": {"layers.1.mlp.down_proj": 3.5, "o_proj": 16.0},
}


def loss_by_hand(model: Any, batch: TokenBatch) -> Tensor:
    ids = batch.input_ids
    mask = torch.arange(ids.shape[1]) < batch.lengths[:, None]
    logprobs = model(input_ids=ids, attention_mask=mask.long()).logits.log_softmax(-1)
    found = logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert batch.loss_weights is not None
    weighted = torch.where(batch.loss_mask[:, 1:], found * batch.loss_weights[:, 1:], 0.0)
    return -weighted.sum()


@pytest.mark.parametrize("patterns", [{}, PATTERNS], ids=["one rank", "a rank for each"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_run_is_pefts_own(kind, patterns):
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    lora = {"rank": 4, "alpha": 8.0, **patterns}
    made = set_up(tiny_model(kind, scale=2.0), optimizer=optimizer, lora=lora, seed=3)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **patterns
    )
    base = tiny_model(kind, scale=2.0)
    torch.manual_seed(3)
    theirs: Any = get_peft_model(base, settings)
    named = {
        name.replace(".default", ""): each
        for name, each in theirs.named_parameters()
        if each.requires_grad
    }
    ours = adapter_tensors(made.model)
    assert ours.keys() == named.keys() and len(ours) == 2 * 2 * 7
    by_hand = torch.optim.AdamW(named.values(), betas=(0.9, 0.95), **optimizer)
    initial = {name: each.detach().clone() for name, each in named.items()}
    for step in range(STEPS):
        assert_near(ours, named)
        batch = random_batch(LENGTHS, seed=step)
        loss = loss_by_hand(theirs, batch)
        loss.backward()
        made.forward_backward(batch, nll_loss)
        grads = {name: each.grad for name, each in ours.items()}
        assert_near(grads, {name: each.grad for name, each in named.items()})
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        metrics = finalize(made.optim_step())
        found = metrics["loss"], metrics["grad_norm"]
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)
        by_hand.step()
        by_hand.zero_grad()
    assert_near(ours, named)
    assert all((each - initial[name]).abs().max() > 1e-3 for name, each in named.items())


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(dict(ours), dict(theirs), atol=2e-5, rtol=1e-4)

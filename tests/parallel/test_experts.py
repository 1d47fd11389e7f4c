"""Mixtures of experts with trainer.backend dtensor, against Hugging Face and the papers."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.models.tiny import tiny_config
from nemorl.models.tiny import tiny_model as tiny_of
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from tests.parallel import ways
from tests.parallel.balance import (
    BATCH,
    COEF,
    LAYOUTS,
    assert_it_balances,
    assert_same,
    sampled,
    steps,
    written,
)
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.ways import weights
from tests.ranks import run_ranks

BIAS = "e_score_correction_bias"
RATE, DTENSOR = 0.01, "FSDP2 2"
ALONE = ParallelPlan()
REPLAY: list[dict[str, Any]] = [{**layout, "router_replay": True} for layout in LAYOUTS]
PLANS = {
    "FSDP2 2": ParallelPlan(dp_shard=2),
    "TP 2": ParallelPlan(dp_shard=1, tp=2, activation_checkpointing="full"),
    "TP 2, whole rows": ParallelPlan(dp_shard=1, tp=2, sequence_parallel=False),
    "CP 2": ParallelPlan(dp_shard=1, cp=2),
}
ON_RANKS = [pytest.param(plan, id=id, marks=pytest.mark.slow) for id, plan in PLANS.items()]


def family(kind: str, folder: Path, **options: Any) -> Any:
    config = tiny_config(CONFIG_MAPPING[kind](**options))
    model = tiny_of(config)
    model.save_pretrained(folder)
    return model


def set_up(folder: Path, plan: ParallelPlan = ALONE, **options: Any) -> DTensorBackend:
    return ways.set_up(None, folder, plan=asdict(plan), optimizer={"lr": 1e-5}, **options)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_gradient_is_hugging_faces(kind: str, tmp_path: Path):
    model = written(kind, tmp_path)
    layouts = [*LAYOUTS, {"micro_batch_tokens": 60}]
    found = steps(tmp_path, ALONE, BATCH, layouts, DTENSOR)
    recompute = ParallelPlan(activation_checkpointing="full")
    found += steps(tmp_path, recompute, BATCH, LAYOUTS[:1], DTENSOR)
    assert_same(model, BATCH, [found])
    assert_it_balances(model)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("plan", ON_RANKS)
def test_the_gradient_is_hugging_faces_on_ranks(plan: ParallelPlan, replay: bool, tmp_path: Path):
    model = written("qwen3_moe", tmp_path)
    batch, layouts = (sampled(model, BATCH), REPLAY) if replay else (BATCH, LAYOUTS)
    layouts = layouts if plan.cp == 1 else layouts[1:]
    found = run_ranks(2, steps, tmp_path, plan, batch, layouts, DTENSOR)
    assert_same(model, batch, found)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_other_families_have_hugging_faces_loss(kind: str, tmp_path: Path):
    model = family(kind, tmp_path, router_aux_loss_coef=COEF)
    if kind == "qwen3_next":
        model.router_aux_loss_coef = COEF
    # Hugging Face's rows, because linear attention rounds otherwise in rows of other widths.
    layouts: list[dict[str, Any]] = [{}, {"train_micro_batch_size": 1}]
    layouts = layouts[:1] if kind == "qwen3_next" else layouts
    found = steps(tmp_path, ALONE, BATCH, layouts, DTENSOR)
    assert_same(model, BATCH, [found], rtol=2e-6)  # of gradients up to 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_device_computes_experts_in_bfloat16(recompute: Any, tmp_path: Path, monkeypatch):
    written("qwen3_moe", tmp_path)
    found: list[Any] = []
    plain = torch.nn.functional.grouped_mm

    def noting(*args: Any, **options: Any) -> Tensor:
        found.append(plain(*args, **options))
        return found[-1]

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noting)
    plan = ParallelPlan(param_dtype="bfloat16", activation_checkpointing=recompute)
    made = set_up(tmp_path, plan)
    made.train_step(BATCH, nll_loss)
    assert found and {each.dtype for each in found} == {torch.bfloat16}
    assert {each.dtype for each in weights(made).values()} == {torch.float32}
    key = "AutocastCUDA"  # which no CPU can show in use
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)


def counted(model: Any, batch: TokenBatch) -> Tensor:
    """Tokens of each expert, `[layers, experts]`: row by row, by what experts are called with."""
    blocks = [part for part in model.modules() if hasattr(part, "experts")]
    counts = torch.zeros(len(blocks), 4)

    def seen(layer: int, experts: Any, args: Any) -> None:
        for expert in args[1].flatten().tolist():
            counts[layer, expert] += 1

    hooks = [
        block.experts.register_forward_pre_hook(partial(seen, layer))
        for layer, block in enumerate(blocks)
    ]
    for ids, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        with torch.no_grad():
            model(ids[segments > 0][None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return counts


def loads(folder: Path, plan: ParallelPlan, layouts: list[dict[str, Any]]) -> list[dict]:
    found = []
    for layout in layouts:
        backend = set_up(folder, plan, trainer=layout)
        found.append(finalize(backend.train_step(BATCH, nll_loss)))
        backend.shutdown()
    return found


@pytest.mark.slow
def test_load_metrics_count_tokens(tmp_path: Path):
    model = family("deepseek_v3", tmp_path)
    with torch.no_grad():  # one expert is never chosen
        for name, tensor in model.state_dict().items():
            if name.endswith(BIAS):
                tensor[1] -= 100.0
    model.save_pretrained(tmp_path)
    counts = counted(model.eval(), BATCH)
    load = (counts.amax(-1) / counts.mean(-1)).mean()
    idle = (counts == 0).float().mean()
    assert idle > 0
    recompute = ParallelPlan(activation_checkpointing="full")
    alone = loads(tmp_path, ALONE, LAYOUTS) + loads(tmp_path, recompute, LAYOUTS[:1])
    first, second = run_ranks(2, loads, tmp_path, ParallelPlan(dp_shard=2), LAYOUTS[:2])
    for metrics in (*alone, *first, *second):
        assert metrics["experts/max_load"] == pytest.approx(float(load), rel=1e-6)
        assert metrics["experts/idle"] == pytest.approx(float(idle), abs=1e-6)


def biases(backend: DTensorBackend) -> Tensor:
    return torch.stack([x.clone() for name, x in backend.weights() if name.endswith(BIAS)])


def moved(folder: Path, plan: ParallelPlan, checkpoint: Path) -> list[Tensor]:
    options: dict[str, Any] = {"trainer": {"router_bias_update_rate": RATE}}
    backend = set_up(folder, plan, **options)
    found = [biases(backend)]
    backend.train_step(BATCH, nll_loss)
    found.append(biases(backend))
    backend.save_checkpoint(checkpoint)
    backend.forward_backward(random_batch([9, 3, 14], seed=1), nll_loss)
    backend.forward_backward(BATCH, nll_loss)
    backend.optim_step()
    found.append(biases(backend))
    backend.shutdown()
    backend = set_up(folder, plan, **options)
    backend.load_checkpoint(checkpoint)
    found.append(biases(backend))
    backend.shutdown()
    return found


@pytest.mark.parametrize(
    "plan", [pytest.param(ALONE, id="alone"), *ON_RANKS], ids=lambda plan: None
)
def test_biases_move_as_in_the_paper(plan: ParallelPlan, tmp_path: Path):
    """DeepSeek-V3: γ down where an expert is overloaded, γ up where it is underloaded."""
    model = family("deepseek_v3", tmp_path / "model").eval()
    args = tmp_path / "model", plan, tmp_path / "checkpoint"
    of_ranks = [moved(*args)] if plan is ALONE else run_ranks(plan.num_ranks, moved, *args)
    own = [x for name, x in model.state_dict().items() if name.endswith(BIAS)]
    wanted = [torch.stack(own).clone()]
    for batches in ([BATCH], [random_batch([9, 3, 14], seed=1), BATCH]):
        counts = sum(counted(model, batch) for batch in batches)
        for bias, count in zip(own, counts, strict=True):
            for expert in range(4):  # the box of the paper, one by one
                if count[expert] > count.mean():
                    bias[expert] -= RATE
                elif count[expert] < count.mean():
                    bias[expert] += RATE
        wanted.append(torch.stack(own).clone())
    assert (wanted[0] != wanted[1]).any() and (wanted[1] != wanted[2]).any()
    for found in of_ranks:
        for each, expect in zip(found, [*wanted, wanted[1]], strict=True):
            torch.testing.assert_close(each, expect, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "trainer", "message"),
    [
        ("deepseek_v3", {"router_aux_loss_coef": 0.1}, "must be 0 for deepseek_v3.* take trainer"),
        ("llama4_text", {"router_replay": True}, "must be off for llama4_text, whose exp"),
        (None, {"router_bias_update_rate": RATE}, "router_bias_update_rate must be 0 with lora"),
    ],
)
def test_what_a_model_does_not_have_is_refused(kind: Any, trainer: dict, message: str, tmp_path):
    family(kind or "qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match=message):
        set_up(tmp_path, trainer=trainer, lora={} if kind else {"rank": 2})


def spread(folder: Path, plan: ParallelPlan, checkpoint: Path) -> tuple[int, dict, dict]:
    backend = set_up(folder, plan)
    experts = next(p for n, p in backend.model.named_parameters() if n.endswith("gate_up_proj"))
    count = len(experts.to_local())
    backend.train_step(BATCH, nll_loss)
    backend.save_checkpoint(checkpoint)
    trained = weights(backend)
    backend.shutdown()
    backend = set_up(folder, plan)
    backend.load_checkpoint(checkpoint)
    resumed = weights(backend)
    backend.shutdown()
    return count, trained, resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "experts", "counts"),
    [
        (ParallelPlan(dp_shard=1, tp=2), 3, [3, 3]),
        (ParallelPlan(dp_shard=2, tp=2), 6, [2, 2, 1, 1]),
    ],
    ids=["an odd number", "TP 2, FSDP2 2"],
)
def test_ranks_of_tensor_parallelism_share_experts(
    plan: ParallelPlan, experts: int, counts: list[int], tmp_path: Path
):
    model = written("qwen3_moe", tmp_path / "model", num_local_experts=experts)
    args = tmp_path / "model", plan, tmp_path / "checkpoint"
    for count, (own, trained, resumed) in zip(
        counts, run_ranks(plan.num_ranks, spread, *args), strict=True
    ):
        assert own == count
        torch.testing.assert_close(resumed, trained, atol=0, rtol=0)
    found = run_ranks(plan.num_ranks, steps, tmp_path / "model", plan, BATCH, LAYOUTS[:1], DTENSOR)
    assert_same(model, BATCH, found)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_samplers_experts_are_trained(kind: str, tmp_path: Path):
    model = written(kind, tmp_path)
    batch = sampled(model, BATCH)
    recompute = ParallelPlan(activation_checkpointing="full")
    found = steps(tmp_path, ALONE, batch, REPLAY, DTENSOR)
    found += steps(tmp_path, recompute, batch, REPLAY[:1], DTENSOR)
    assert_same(model, batch, [found])


def forced_in_groups(experts: Tensor, router: Any, _: Any, output: Any) -> Any:
    """DeepSeek-V3's weights of given experts: sigmoid scores, normalized and scaled."""
    logits, _, own = output
    experts = torch.where(experts < 0, own, experts.long())
    weights = logits.sigmoid().gather(-1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor, experts


def forced_softmax(experts: Tensor, router: Any, _: Any, output: Any) -> Any:
    """gpt-oss's: the softmax over the logits of the given experts alone."""
    logits, _, own = output
    experts = torch.where(experts < 0, own, experts.long())
    return logits, logits.gather(-1, experts).softmax(-1), experts


@pytest.mark.parametrize(
    ("kind", "weigh"), [("deepseek_v3", forced_in_groups), ("gpt_oss", forced_softmax)]
)
def test_given_experts_have_the_routers_weights(kind: str, weigh: Any, tmp_path: Path):
    model = family(kind, tmp_path)
    backend = set_up(tmp_path, trainer={"router_replay": True}, keep_reference=True)
    own = backend.get_reference_logprobs(BATCH).values
    batch = sampled(model, BATCH, weigh)
    found = backend.get_logprobs(batch).values
    with pytest.raises(ValueError, match="routed_experts must be in every batch"):
        backend.train_step(BATCH, nll_loss)
    assert torch.equal(backend.get_reference_logprobs(batch).values, own)
    assert not any("forward" in vars(part) for part in backend.model.modules())
    backend.shutdown()
    with torch.no_grad():
        mask = (BATCH.segment_ids > 0).long()
        logprobs = model(BATCH.input_ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    wanted = logprobs.gather(-1, BATCH.input_ids[:, 1:, None])[..., 0]
    where = BATCH.response_mask[:, 1:]
    torch.testing.assert_close(found[:, 1:][where], wanted[where], atol=2e-5, rtol=0)
    assert (found - own)[BATCH.response_mask].abs().max() > 0.01


def test_a_router_that_chooses_otherwise_is_found(tmp_path: Path, monkeypatch):
    """It would take its own experts, and nothing would say so."""
    model = written("mixtral", tmp_path)

    def by_sorting(self: Any, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        experts = logits.argsort(-1, descending=True)[:, : self.top_k]
        return logits, logits.gather(-1, experts).softmax(-1), experts

    monkeypatch.setattr(type(model.model.layers[0].mlp.gate), "forward", by_sorting)
    backend = set_up(tmp_path, trainer={"router_replay": True})
    with pytest.raises(RuntimeError, match="can't be replayed: the model's router does not choose"):
        backend.train_step(sampled(model, BATCH), nll_loss)
    backend.shutdown()

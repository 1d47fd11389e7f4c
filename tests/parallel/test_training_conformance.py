"""What every TrainingBackend must do. A new backend joins by adding a maker to BACKENDS."""

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind, filter_logits
from nemorl.losses.types import LossOutput, Needs, finalize
from nemorl.parallel.backend import TrainingBackend
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    OptimizerConfig,
    OptimSettings,
    TrainerConfig,
)
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import ATOL, DEVICE, LAYOUTS, LENGTHS, nll_loss, random_batch
from tests.parallel.ways import weights
from tests.runtime.runs import TIMES
from tests.tiny_models import KINDS, tiny_model

SAME_BITS = {"deterministic": DEVICE != "cpu"}
OPTIMIZER = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, schedule="linear", warmup_steps=1
)


def dtensor(model: nn.Module, config: BackendConfig) -> TrainingBackend:
    backend = DTensorBackend(model)
    backend.setup(config)
    return backend


def dtensor_with_lora(model: nn.Module, config: BackendConfig) -> TrainingBackend:
    return dtensor(model, replace(config, lora=LoRAConfig(rank=4, alpha=8.0)))


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


BACKENDS: dict[str, Callable[[nn.Module, BackendConfig], TrainingBackend]] = {
    "dtensor": dtensor,
    "dtensor with lora": dtensor_with_lora,
}
if DEVICE == "cpu" and find_spec("ray"):
    from tests.runtime.ranks.shared_ranks import ranked

    BACKENDS["dtensor on two ranks"] = ranked
    BACKENDS["megatron on two ranks"] = partial(ranked, backend="megatron", pp=2)
OFFLOADING = sorted(name for name in BACKENDS if not name.startswith("megatron"))
"""Backends with which a run may set `trainer.offload_during_generation`."""
ADAPTED = {"dtensor with lora": adapted}
"""Backends that leave the model's weights alone and train something beside them: how the plainest
loop gets what it trains.
"""


def slow_on_ranks(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] * n.endswith("ranks")) for n in names]


@pytest.fixture(params=slow_on_ranks(sorted(BACKENDS)))
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(backend_name: str) -> Callable[..., TrainingBackend]:
    def maker(
        model: nn.Module | None = None,
        *,
        optimizer: OptimizerConfig = OPTIMIZER,
        keep_reference: bool = False,
        seed: int = 0,
        **settings,
    ) -> TrainingBackend:
        settings = {"param_dtype": "float32", **settings}  # on GPUs, too
        of_plan = {field.name for field in fields(ParallelPlan)} & settings.keys()
        plan = ParallelPlan(**{name: settings.pop(name) for name in of_plan})
        config = BackendConfig(
            trainer=TrainerConfig(device=DEVICE, **settings),
            optimizer=optimizer,
            total_steps=4,
            keep_reference=keep_reference,
            seed=seed,
            parallel=plan,
        )
        return BACKENDS[backend_name](model or tiny_model(scale=2.0), config)

    return maker


def plain_logprobs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def plain_loss(model: nn.Module, batch: TokenBatch) -> torch.Tensor:
    loss = torch.zeros(())
    for row, length in enumerate(LENGTHS):
        if length > 1:
            ids, mask = batch.input_ids[row : row + 1, :length], batch.loss_mask[row, 1:length]
            loss = loss - plain_logprobs(model, ids)[mask].sum() / batch.loss_mask.sum()
    return loss


def assert_same_weights(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float
) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logprobs_are_those_of_each_sequence_alone(make, kind, layout):
    batch = random_batch(LENGTHS)
    logprobs = make(tiny_model(kind, scale=2.0), **LAYOUTS[layout]).get_logprobs(batch).values
    plain = tiny_model(kind, scale=2.0)
    assert logprobs.shape == batch.input_ids.shape
    for row, length in enumerate(LENGTHS):
        ids = batch.input_ids[row : row + 1, :length]
        with torch.no_grad():
            expected = plain_logprobs(plain, ids)
        torch.testing.assert_close(logprobs[row, 1:length], expected, atol=ATOL, rtol=0)
        assert logprobs[row, 0] == 0
        assert (logprobs[row, length:] == 0).all()


def plain(backend_name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in plain PyTorch, and its AdamW with the settings of `OPTIMIZER`."""
    model = ADAPTED.get(backend_name, lambda model: model)(tiny_model(scale=2.0, **options)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    return model, optimizer


def check_steps(backend: Any, backend_name: str, given: list[Any], **options: Any) -> None:
    """Steps with given settings, or None for `train_step`, are those in plain PyTorch."""
    model, optimizer = plain(backend_name, **options)
    own = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "max_grad_norm": 0.5}
    for step, each in enumerate(given):
        batch = random_batch(LENGTHS, seed=step)
        if each is None:
            metrics = finalize(backend.train_step(batch, nll_loss))
        else:
            expected = backend.get_logprobs(batch).values.where(batch.loss_mask, 0.0)
            found = backend.forward_backward(batch, nll_loss, token_logprobs=True).token_logprobs
            torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
            assert not found.requires_grad
            metrics = finalize(backend.optim_step(OptimSettings(**each)))
        lr = [1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3][step]
        taken = {**own, "lr": lr, **(each or {})}
        optimizer.zero_grad()
        loss = plain_loss(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), taken["max_grad_norm"])
        for group in optimizer.param_groups:
            betas = taken["beta1"], taken["beta2"]
            group |= {"lr": taken["lr"], "eps": taken["eps"], "betas": betas}
        optimizer.param_groups[0]["weight_decay"] = taken["weight_decay"]
        optimizer.step()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=ATOL)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["lr"] == pytest.approx(taken["lr"])
        assert metrics["num_tokens"] == sum(LENGTHS)
    if backend_name in ADAPTED:
        model = model.merge_and_unload()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    # Adam divides by √v: where a gradient is near 0 its rounding shows as up to a share of lr.
    assert_same_weights(weights(backend), expected, atol=2e-4)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("tied", [True, False])
def test_three_steps_do_not_depend_on_the_layout(make, backend_name, layout, tied):
    backend = make(tiny_model(scale=2.0, tied=tied), **LAYOUTS[layout])
    check_steps(backend, backend_name, [None] * 3, tied=tied)


def test_settings_are_of_one_step(make, backend_name):
    backend = make(tiny_model(scale=2.0), sequence_packing=True, micro_batch_tokens=40)
    others = {"beta1": 0.5, "beta2": 0.8, "eps": 0.01, "weight_decay": 1, "max_grad_norm": 0.1}
    given = [{}, {"lr": 0.03, **others}, {"beta2": 0.5, "max_grad_norm": math.inf, "lr": 0}, None]
    check_steps(backend, backend_name, given)
    assert backend.forward_backward(random_batch(LENGTHS), nll_loss).token_logprobs is None


def test_the_batchs_kind_of_logprobs_is_applied(make):
    kind = LogprobKind(temperature=0.7, top_k=5)
    batch = replace(random_batch([12, 7]), logprob_kind=kind)
    model = tiny_model(scale=2.0)
    logprobs = make(tiny_model(scale=2.0)).get_logprobs(batch)
    assert logprobs.kind == kind
    ids = batch.input_ids[:1]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
    logits = filter_logits(logits, temperature=0.7, top_k=5, keep=ids[:, 1:])
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs.values[:1, 1:], expected, atol=ATOL, rtol=0)


def test_compute_gives_what_is_needed_and_nothing_else(make):
    batch, model = random_batch(LENGTHS), tiny_model(scale=2.0)
    backend = make(tiny_model(scale=2.0), sequence_packing=True)
    plain, both = backend.compute(batch, Needs()), backend.compute(batch, Needs(entropy=True))
    pairs = torch.stack([batch.input_ids, batch.input_ids.clamp(max=1)], -1)
    sets = backend.compute(replace(batch, target_ids=pairs), Needs(top_k=5, targets=True))
    logprobs = backend.get_logprobs(batch).values
    for output in (plain, both, sets):
        torch.testing.assert_close(output.token_logprobs, logprobs, atol=0, rtol=0)
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            every = model(batch.input_ids[row : row + 1, :length], use_cache=False).logits[0, :-1]
        expected = -(every.softmax(-1) * every.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(both.entropy[row, 1:length], expected, atol=ATOL, rtol=0)
        assert (both.entropy[row, length:] == 0).all() and both.entropy[row, 0] == 0
        mass, top = every.softmax(-1), sets.top_ids[row, 1:length]
        assert torch.equal(top, mass.topk(5).indices) and not sets.top_ids[row, length:].any()
        for name, ids in {"top": top, "target": pairs[row, 1:length]}.items():
            inside, rest = (vars(sets)[f"{name}{x}_logprobs"][row, 1:length] for x in ("", "_rest"))
            torch.testing.assert_close(inside, mass.gather(-1, ids).log(), atol=ATOL, rtol=0)
            others = mass.scatter(-1, ids, 0.0).sum(-1).log()
            torch.testing.assert_close(rest, others, atol=ATOL, rtol=0)


def test_bfloat16_is_close_and_keeps_float32_weights(make):
    batch = random_batch(LENGTHS)
    exact, rounded = make(), make(param_dtype="bfloat16")
    difference = (exact.get_logprobs(batch).values - rounded.get_logprobs(batch).values).abs()
    assert 1e-4 < difference.max() < 0.15
    metrics = finalize(rounded.train_step(batch, nll_loss))
    assert metrics["loss"] == pytest.approx(
        finalize(exact.train_step(batch, nll_loss))["loss"], rel=0.02
    )
    assert {tensor.dtype for _, tensor in rounded.weights()} == {torch.float32}


def test_the_reference_stays_where_it_was(make):
    backend, batch = make(keep_reference=True), random_batch(LENGTHS)
    before = backend.get_logprobs(batch).values
    backend.train_step(batch, nll_loss)
    torch.testing.assert_close(backend.get_reference_logprobs(batch).values, before, atol=0, rtol=0)
    assert not torch.equal(backend.get_logprobs(batch).values, before)
    with pytest.raises(RuntimeError, match="keep_reference"):
        make().get_reference_logprobs(batch)


@pytest.mark.parametrize("backend_name", slow_on_ranks(OFFLOADING))
def test_offloading_changes_no_number(make):
    backend, batch = make(keep_reference=True), random_batch(LENGTHS)
    reference = backend.get_reference_logprobs(batch).values
    backend.train_step(batch, nll_loss)
    before, values = weights(backend), backend.get_logprobs(batch).values
    for keep in (True, False):
        backend.offload(keep_weights=keep)
        backend.offload(keep_weights=keep)
        assert_same_weights(weights(backend), before, 0)
        torch.testing.assert_close(backend.get_logprobs(batch).values, values, atol=0, rtol=0)
    backend.offload()
    again = backend.get_reference_logprobs(batch).values
    torch.testing.assert_close(again, reference, atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_exported_names_are_hugging_faces(make, tied):
    names = [name for name, _ in make(tiny_model(tied=tied)).weights()]
    assert sorted(names) == sorted(name for name, _ in tiny_model(tied=tied).named_parameters())
    assert ("lm_head.weight" in names) is not tied


def test_a_checkpoint_continues_bit_for_bit(make, backend_name, tmp_path: Path):
    backend = make(**SAME_BITS)
    for step in range(2):
        backend.train_step(random_batch(LENGTHS, seed=step), nll_loss)
    backend.save_checkpoint(tmp_path / "saved")

    def two_more(trainer: TrainingBackend) -> list[dict[str, float]]:
        found = []
        for step in (2, 3):
            metrics = finalize(trainer.train_step(random_batch(LENGTHS, seed=step), nll_loss))
            found.append({name: metrics[name] for name in metrics.keys() - set(TIMES)})
        return found

    expected = two_more(backend)
    other = make(None if backend_name in ADAPTED else tiny_model(seed=5), seed=5, **SAME_BITS)
    other.load_checkpoint(tmp_path / "saved")
    assert two_more(other) == expected
    assert_same_weights(weights(other), weights(backend), atol=0)
    backend.save_checkpoint(tmp_path / "unbroken")
    other.save_checkpoint(tmp_path / "resumed")
    unbroken, resumed = (saved_tensors(tmp_path / name) for name in ("unbroken", "resumed"))
    assert unbroken == resumed != {}, "the files have the same tensors in the same order"


def saved_tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_checkpoint_of_another_model_changes_nothing(make, tmp_path: Path):
    make(tiny_model(hidden_size=16)).save_checkpoint(tmp_path / "saved")
    backend = make()
    before = weights(backend)
    with pytest.raises(ValueError, match=r"must be of .*the model in use"):
        backend.load_checkpoint(tmp_path / "saved")
    assert_same_weights(weights(backend), before, atol=0)


def test_the_reference_of_a_checkpoint_is_the_one_in_use(make, tmp_path: Path):
    make().save_checkpoint(tmp_path / "saved")
    make(keep_reference=True).load_checkpoint(tmp_path / "saved")
    backend = make(tiny_model(seed=5), keep_reference=True)
    before = weights(backend)
    with pytest.raises(ValueError, match=r"other weights: load the .* of that run again"):
        backend.load_checkpoint(tmp_path / "saved")
    assert_same_weights(weights(backend), before, atol=0)


@pytest.mark.parametrize(
    ("factor", "added", "what"),
    [(math.inf, 0.0, "loss|gradient's norm"), (1.0, math.nan, "loss")],
    ids=["gradient", "loss alone"],
)
def test_what_is_not_finite_leaves_the_weights(make, factor, added, what):
    def broken(output, batch) -> LossOutput:
        result = nll_loss(output, batch)
        return replace(result, loss=result.loss * factor + added)

    backend = make()
    before = weights(backend)
    message = f"the ({what}) of optimizer step 1 must be finite, but it is (inf|nan): the weights"
    with pytest.raises(FloatingPointError, match=message):
        backend.train_step(random_batch([5, 6]), broken)
    assert_same_weights(weights(backend), before, atol=0)
    assert backend.step == 0


def test_an_empty_mask_changes_nothing_but_decay(make):
    backend = make(optimizer=OptimizerConfig(lr=1e-2))
    before = weights(backend)
    batch = random_batch([5, 8])
    empty = replace(batch, loss_weights=torch.zeros_like(batch.loss_weights))
    metrics = finalize(backend.train_step(empty, nll_loss))
    assert metrics["loss"] == 0 == metrics["grad_norm"]
    assert_same_weights(weights(backend), before, atol=0)


def test_a_sequence_longer_than_the_budget_is_named(make):
    with pytest.raises(ValueError, match="30"):
        make(micro_batch_tokens=20).get_logprobs(random_batch(LENGTHS))

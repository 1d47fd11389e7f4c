"""AdamW by either implementation, Muon and AdamW in 8 bits, by their definitions; rates."""

import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from transformers import CONFIG_MAPPING, get_scheduler

from nemorl.models.adapters import full_tensor
from nemorl.models.tiny import tiny_config
from nemorl.models.tiny import tiny_model as tiny_of
from nemorl.parallel.accumulation import learning_rate
from nemorl.parallel.config import OptimizerConfig, OptimSettings
from nemorl.parallel.dtensor import optimizers
from nemorl.parallel.dtensor.optimizers import Muon, make_optimizer
from tests.parallel import ways
from tests.parallel.batches import LENGTHS, nll_loss, random_batch
from tests.parallel.saved import assert_same, on_all
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import tiny_critic, tiny_model

STEPS = 4


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): five times
    X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X, from X = G / |G|, in bfloat16.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.T).float()


def scale_of(rows: int, columns: int) -> float:
    """Liu et al., "Muon is Scalable for LLM Training" (2025), equation 4."""
    return 0.2 * math.sqrt(max(rows, columns))


def authors_muon(weight: Tensor, mean: Tensor, grad: Tensor, config: OptimizerConfig) -> None:
    mean.mul_(config.momentum).add_(grad, alpha=1 - config.momentum)
    look_ahead = (1 - config.momentum) * grad + config.momentum * mean
    update = newton_schulz(look_ahead, 5)
    weight.mul_(1 - config.lr * config.weight_decay)
    weight.sub_(config.lr * scale_of(*weight.shape) * update)


@pytest.mark.parametrize("exact", [True, False], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize("momentum", [0.95, 0.8])
def test_muon_is_its_authors(momentum, exact, monkeypatch):
    """In float32 to rounding; bfloat16, in which it runs, has 8 bits, and both round otherwise."""
    if exact:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=momentum)
    model = tiny_model()
    hidden = [each for each in model.model.layers.parameters() if each.ndim == 2]
    theirs = [each.detach().clone() for each in hidden]
    means = [torch.zeros_like(each) for each in theirs]
    optimizer = make_optimizer(model, config)
    for step in range(STEPS):
        gradients(list(model.parameters()), step)
        for weight, mean, parameter in zip(theirs, means, hidden, strict=True):
            authors_muon(weight, mean, parameter.grad, config)
        optimizer.step()
    for weight, mean, parameter in zip(theirs, means, hidden, strict=True):
        state = optimizer.parts[0].state[parameter]["momentum_buffer"]
        torch.testing.assert_close(state, mean, atol=1e-6, rtol=0)
        path = STEPS * config.lr * scale_of(*weight.shape) * math.sqrt(min(weight.shape))
        assert (parameter - weight).norm() < (1e-5 if exact else 0.03) * path


def test_muon_of_experts_is_torchs_of_each_matrix():
    model = tiny_model("qwen3_moe")
    stacks = [each for name, each in model.named_parameters() if "experts" in name]
    each = [[nn.Parameter(matrix) for matrix in stack.detach().clone()] for stack in stacks]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    ours = make_optimizer(model, OptimizerConfig(name="muon", **options))
    theirs = torch.optim.Muon(chain(*each), adjust_lr_fn="match_rms_adamw", **options)
    for step in range(STEPS):
        gradients(list(model.parameters()), step)
        for stack, matrices in zip(stacks, each, strict=True):
            for matrix, grad in zip(matrices, stack.grad, strict=True):
                matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    assert len(stacks) == 4 and stacks[0].shape == (4, 48, 32)
    for stack, matrices in zip(stacks, each, strict=True):
        torch.testing.assert_close(stack, torch.stack(matrices), atol=1e-6, rtol=0)


WRONG = {"lr": [-1, math.nan, math.inf], "beta1": [1.0, -0.1], "eps": [0, math.nan]}
WRONG |= {"beta2": [1.5], "weight_decay": [-1, math.nan], "max_grad_norm": [0, math.nan]}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name in WRONG for x in WRONG[name]])
def test_settings_of_a_step_are_checked(name: str, value: float):
    with pytest.raises(ValueError, match=rf"optimizer.{name} must .* but it is {value}"):
        OptimSettings(**{name: value})


def test_muon_takes_a_steps_rate_and_decay_and_refuses_what_it_does_not_have():
    batch, made = random_batch(LENGTHS), list[Any]()
    for given in ({}, {"weight_decay": 0.5}):
        configured = {} if given else {"weight_decay": 0.5}
        backend = set_up(tiny_model(), optimizer={"name": "muon", **configured})
        backend.forward_backward(batch, nll_loss)
        for name in ("beta1", "beta2", "eps"):
            must = f"settings.{name} must be None with optimizer.name muon, but it is 0.5"
            with pytest.raises(ValueError, match=must):
                backend.optim_step(OptimSettings(**{name: 0.5}))
        backend.optim_step(OptimSettings(lr=0.03, **given))
        made.append(dict(backend.weights()))
    torch.testing.assert_close(*made, atol=0, rtol=0)


def groups(model: nn.Module, **options: Any) -> list[tuple[str, set[str], float]]:
    names = {id(each): name for name, each in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, **options))
    return [
        (type(part).__name__, {names[id(each)] for each in group["params"]}, group["weight_decay"])
        for part in optimizer.parts
        for group in part.param_groups
    ]


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
@pytest.mark.parametrize("kind", ["tied", "untied", "critic"])
def test_hidden_matrices_alone_are_not_adamws(name, kind):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    make = {"tied": tiny_model, "untied": partial(tiny_model, tied=False), "critic": tiny_critic}
    model = make[kind]()
    (one, hidden, decay), (_, outer, outer_decay), (_, vectors, vectors_decay) = groups(
        model, name=name
    )
    assert one == {"muon": "Muon", "adamw8bit": "AdamW8bit"}[name]
    assert (decay, outer_decay, vectors_decay) == (0.1, 0.1, 0.0)
    assert len(hidden) == 2 * 7 and all(".layers." in each for each in hidden)
    assert (
        outer
        == {
            "tied": {"model.embed_tokens.weight"},
            "untied": {"model.embed_tokens.weight", "lm_head.weight"},
            "critic": {"model.embed_tokens.weight", "score.weight"},
        }[kind]
    )
    assert all(each.endswith(("bias", "norm.weight", "layernorm.weight")) for each in vectors)


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_experts_matrices_are_hidden_ones_but_not_their_biases_nor_convolutions(name, kind):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    model = tiny_of(tiny_config(CONFIG_MAPPING[kind]()))
    found = {name.rpartition("layers.")[2][2:] for name in groups(model, name=name)[0][1]}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= found
    assert not [each for each in found if "bias" in each or "conv1d" in each]


def backend(plan: Any, folder: Path | None = None, *, rank: int = 0, **optimizer: Any) -> Any:
    model, optimizer = wide_model() if folder is None else None, {"lr": 1e-5, **optimizer}
    return set_up(model, folder or "", lora={"rank": rank}, optimizer=optimizer, plan=plan)


def wide_model(kind: str = "qwen2") -> nn.Module:
    return tiny_model(kind, hidden_size=256, intermediate_size=512, head_dim=64, scale=0.5)


def on_ranks(shape: tuple[int, ...], placements: list[Any]) -> tuple[float, list[str]]:
    """Return the largest difference from one rank, and what this rank did in its last step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    names = ("outer", "inner")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    stacked = [Shard(0) if isinstance(each, Shard) else each for each in placements]
    sizes = {(9, 6): placements, (4, 8): placements, (5, 5): placements, (3, 6, 4): stacked}
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(size)) for size in sizes]

    def shared_out(tensors: Any) -> list[Any]:
        pairs = zip(tensors, sizes.values(), strict=True)
        return [distribute_tensor(each.detach(), mesh, places) for each, places in pairs]

    shared = [nn.Parameter(each) for each in shared_out(plain)]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    ours, alone = Muon(shared, **options), Muon(plain, **options)
    for step in range(STEPS):
        gradients(plain, step)
        for one, grad in zip(shared, shared_out(each.grad for each in plain), strict=True):
            one.grad = grad
        alone.step()
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            for place, name in (
                (optimizers, "full_tensor"),
                (optimizers, "_change"),
                (torch.distributed, "broadcast"),
            ):
                patched.setattr(place, name, noted(events, name, getattr(place, name)))
            ours.step()
    pairs = zip(shared, plain, strict=True)
    return max(float((full_tensor(one) - other).abs().max()) for one, other in pairs), events


def noted(events: list[str], name: str, function: Any) -> Any:
    def noting(value: Tensor, *args: Any, **options: Any) -> Any:
        events.append(f"{name} of experts" if value.ndim > 2 else name)
        return function(value, *args, **options)

    return noting


@pytest.mark.slow
def test_muon_of_shards_is_muon_of_the_whole_and_ranks_compute_at_the_same_time():
    for ranks, shape, placements in (
        (2, (2,), [Shard(0)]),
        (2, (2,), [Replicate()]),
        (4, (2, 2), [Shard(0), Shard(1)]),
        (4, (1, 4), [Replicate(), Shard(0)]),
    ):
        along = max(shape)
        for rank, (worst, events) in enumerate(run_ranks(ranks, on_ranks, shape, placements)):
            assert worst == 0
            expected, this = ["_change of experts"], rank // (ranks // along)
            for turn in (range(3)[first : first + along] for first in range(0, 3, along)):
                expected += ["full_tensor"] * len(turn) + ["_change"] * (this < len(turn))
                expected += ["broadcast"] * len(turn)
            assert events == expected


PLANS = {"alone": {}, "fsdp 2": {"dp_shard": 2}}
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "lr": 2e-3, "weight_decay": 0.1},
    "adamw8bit": {"name": "adamw8bit", "lr": 1e-3, "weight_decay": 0.1},
}


def save_and_go_on(root: Path, plan: str, name: str) -> list[float]:
    made = backend(PLANS[plan], root / "model", **OPTIONS[name])
    losses = [ways.step(made) for _ in range(2)]
    made.save_checkpoint(root / plan)
    losses += [ways.step(made) for _ in range(2)]
    made.save_checkpoint(root / f"{plan} later")
    return losses


def load_and_go_on(root: Path, plan: str, name: str) -> list[float]:
    losses = []
    for other in PLANS:
        made = backend(PLANS[plan], root / "model", **OPTIONS[name])
        made.load_checkpoint(root / other)
        made.save_checkpoint(root / f"{other} by {plan}")
        losses += [ways.step(made) for _ in range(2)]
        made.save_checkpoint(root / f"{other} by {plan} later")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_any_number_of_ranks_trains_alike_and_goes_on_from_any_other(name, kind, tmp_path: Path):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    wide_model(kind).save_pretrained(tmp_path / "model")
    losses = {plan: on_all(PLANS[plan], save_and_go_on, tmp_path, plan, name) for plan in PLANS}
    assert losses["alone"][-1] < losses["alone"][0]
    # Gradients round otherwise on two ranks, and so do momentum and its 8 bits after them.
    assert losses["fsdp 2"] == pytest.approx(losses["alone"], abs=2e-3)
    for plan in PLANS:
        again = on_all(PLANS[plan], load_and_go_on, tmp_path, plan, name)
        assert again == pytest.approx(losses["alone"][2:] * 2, abs=2e-3)
        for other in PLANS:
            assert_same(tmp_path / other, tmp_path / f"{other} by {plan}")
        assert_same(tmp_path / f"{plan} later", tmp_path / f"{plan} by {plan} later")


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path):
    made = backend({}, name="muon")
    made.train_step(random_batch(LENGTHS), nll_loss)
    made.save_checkpoint(tmp_path / "muon")
    other = backend({})
    message = "optimizer.name must be muon, as when .*muon was written, but it is 'adamw'"
    with pytest.raises(ValueError, match=message):
        other.load_checkpoint(tmp_path / "muon")
    other.save_checkpoint(tmp_path / "adamw")
    with pytest.raises(ValueError, match=r"must be adamw, as when .* but it is 'muon'"):
        made.load_checkpoint(tmp_path / "adamw")


def test_8_bits_are_those_of_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes").optim
    model, theirs = wide_model(), wide_model()
    ours = make_optimizer(model, OptimizerConfig(name="adamw8bit", lr=1e-2, weight_decay=0.1))
    hidden = [each for each in theirs.model.layers.parameters() if each.ndim == 2]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    by_hand = optim.AdamW8bit(hidden, **options)
    for number in range(STEPS):
        gradients(list(model.parameters()), number)
        gradients(list(theirs.parameters()), number)
        ours.step()
        by_hand.step()
    own = [each for each in model.model.layers.parameters() if each.ndim == 2]
    for one, other in zip(own, hidden, strict=True):
        assert torch.equal(one, other)
        found = ours.state[one]
        assert found["state1"].dtype == found["state2"].dtype == torch.uint8
        assert torch.equal(found["state2"], by_hand.state[other]["state2"])


def narrow() -> str:
    with pytest.raises(ValueError) as caught:
        set_up(tiny_model(), optimizer={"name": "adamw8bit"}, plan={"dp_shard": 2})
    return str(caught.value)


@pytest.mark.slow
def test_shards_of_parts_of_blocks_are_refused():
    pytest.importorskip("bitsandbytes")
    rows = "the rows of model.layers.0.self_attn.q_proj.weight must be whole"
    assert all(message.startswith(rows) for message in run_ranks(2, narrow))
    made = set_up(tiny_model(), optimizer={"name": "adamw8bit"})  # one rank needs no whole blocks
    made.train_step(random_batch(LENGTHS), nll_loss)


def test_experts_of_parts_of_blocks_are_refused():
    pytest.importorskip("bitsandbytes")
    model = tiny_model("qwen3_moe", moe_intermediate_size=20)
    message = r"the experts of .*down_proj must be whole blocks of 256 .*, but it is 640: take opt"
    with pytest.raises(ValueError, match=message):
        make_optimizer(model, OptimizerConfig(name="adamw8bit"))


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

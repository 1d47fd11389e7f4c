"""A model spread over ranks: what is loaded and refused; its numbers are in parity/."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nemorl.losses.types import finalize
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.lora import adapter_tensors
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import nll_loss, random_batch
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

LENGTHS = [9, 2, 30, 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(scale=2.0, tied=False).save_pretrained(path)
    return path


def set_up(folder: Path | str, model: nn.Module | None = None, **options: Any) -> DTensorBackend:
    backend = DTensorBackend(model)
    config = BackendConfig(
        model=ModelConfig(path=str(folder), from_scratch=options.pop("from_scratch", False)),
        trainer=TrainerConfig(device="cpu"),
        optimizer=OptimizerConfig(lr=1e-2),
        parallel=ParallelPlan(**options.pop("plan", {})),
        **options,
    )
    backend.setup(config)
    return backend


def refusal(folder: Path | str, options: dict[str, Any]) -> str:
    try:
        set_up(folder, **options)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def forms(backend: DTensorBackend) -> set[tuple[str, torch.dtype]]:
    return {(type(parameter).__name__, parameter.dtype) for parameter in backend.model.parameters()}


def life(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Logprobs before and after a step, and the forms of the parameters at every point."""
    backend = set_up(folder, plan=plan, keep_reference=True)
    batch = random_batch(LENGTHS)
    seen, found = [forms(backend)], {"first": backend.get_logprobs(batch).values}
    seen.append(forms(backend))

    def bad(output: Any, part: Any) -> Any:
        raise RuntimeError("this loss fails")

    with pytest.raises(RuntimeError, match="this loss fails"):
        backend.train_step(batch, bad)
    seen.append(forms(backend))
    assert backend.step == 0
    found["metrics"] = finalize(backend.train_step(batch, nll_loss))
    seen.append(forms(backend))
    found |= {
        "after": backend.get_logprobs(batch).values,
        "reference": backend.get_reference_logprobs(batch).values,
    }
    found["weights"] = {name: tensor.clone() for name, tensor in backend.weights()}
    found["cast"] = {tensor.dtype for _, tensor in backend.weights(torch.bfloat16)}
    assert all(one == {("DTensor", torch.float32)} for one in seen), seen
    backend.shutdown()
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    backend = set_up(folder, keep_reference=True)
    batch = random_batch(LENGTHS)
    return {
        "first": backend.get_logprobs(batch).values,
        "metrics": finalize(backend.train_step(batch, nll_loss)),
        "after": backend.get_logprobs(batch).values,
        "weights": {name: tensor.clone() for name, tensor in backend.weights()},
    }


@pytest.mark.parametrize(
    "plan", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "cpu_offload": True}], ids=str
)
def test_a_step_on_ranks(folder, alone, plan):
    for found in run_ranks(2, life, folder, plan):
        for name in ("first", "after"):
            torch.testing.assert_close(found[name], alone[name], atol=1e-4, rtol=0)
        torch.testing.assert_close(found["reference"], alone["first"], atol=2e-6, rtol=0)
        torch.testing.assert_close(found["weights"], alone["weights"], atol=2e-4, rtol=0)
        assert found["cast"] == {torch.bfloat16}
        for name in ("loss", "grad_norm", "lr", "num_tokens"):
            assert found["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5)


def test_in_bfloat16_the_parameters_stay_float32(folder, alone):
    for found in run_ranks(2, life, folder, {"dp_shard": 2, "param_dtype": "bfloat16"}):
        torch.testing.assert_close(found["first"], alone["first"], atol=0.05, rtol=0)


def loaded(folder: Path, scratch: bool, lora: int, plan: dict) -> dict[str, torch.Tensor]:
    options = {"from_scratch": scratch, "lora": LoRAConfig(rank=lora), "seed": 3}
    backend = set_up(folder, plan=plan, **options)
    metrics = finalize(backend.train_step(random_batch(LENGTHS), nll_loss))
    return {name: tensor.clone() for name, tensor in backend.weights()} | {
        "loss": torch.tensor(metrics["loss"]),
        "base": backend._base,
    }


@pytest.mark.parametrize(
    ("scratch", "lora", "plan"),
    [
        (True, 0, {"dp_shard": 2}),
        (False, 4, {"dp_shard": 2}),
        (False, 4, {"tp": 2}),
        (False, 4, {"tp": 2, "sequence_parallel": False}),
        (False, 4, {"dp_shard": 2, "tp": 2}),
    ],
    ids=["from scratch", "LoRA", "LoRA, TP + SP", "LoRA, TP", "LoRA, FSDP2 x TP + SP"],
)
def test_it_begins_with_the_weights_of_one_process(folder, scratch, lora, plan):
    plain = set_up(folder, from_scratch=scratch, lora=LoRAConfig(rank=lora), seed=3)
    loss = finalize(plain.train_step(random_batch(LENGTHS), nll_loss))["loss"]
    ranks = 2 * plan.get("tp", 1) if "dp_shard" in plan else 2
    for found in run_ranks(ranks, loaded, folder, scratch, lora, plan):
        assert float(found.pop("loss")) == pytest.approx(loss, abs=2e-6)
        assert found.pop("base") == plain._base
        for name, tensor in plain.weights():
            torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=0)


def dropped(folder: Path, sequence_parallel: bool) -> tuple[list[float], list[torch.Tensor]]:
    plan = {"tp": 2, "sequence_parallel": sequence_parallel}
    backend = set_up(folder, plan=plan, lora=LoRAConfig(rank=4, dropout=0.3))
    batch = random_batch(LENGTHS)
    losses = [finalize(backend.train_step(batch, nll_loss))["loss"] for _ in range(3)]
    adapters = adapter_tensors(backend.model).values()
    whole = [each for each in adapters if each.placements[-1].is_replicate()]
    return losses, [each.to_local().detach().clone() for each in whole]


def test_adapters_with_dropout_stay_the_same_on_ranks_of_tensor_parallelism(folder):
    """The matrix of an adapter that is not cut, with and without sequence parallelism."""
    found = [each for on in (True, False) for each in run_ranks(2, dropped, folder, on)]
    assert len(found[0][1]) == 2 * 7
    for losses, whole in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(whole, found[0][1], atol=1e-4, rtol=0)
    assert all(map(torch.equal, found[0][1], found[1][1]))


def given(seed: int) -> float:
    backend = set_up("", tiny_model(seed=seed), plan={"tp": 2})
    return float(backend.get_logprobs(random_batch(LENGTHS)).values.sum())


def test_a_model_that_every_rank_was_given(folder):
    plain = set_up("", tiny_model(seed=5))
    expected = float(plain.get_logprobs(random_batch(LENGTHS)).values.sum())
    assert run_ranks(2, given, 5) == [pytest.approx(expected, abs=1e-3)] * 2


def test_weights_in_another_type_are_read(folder, tmp_path):
    tiny_model(scale=2.0, tied=False).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    expected = set_up(tmp_path / "half").get_logprobs(random_batch(LENGTHS)).values
    for found in run_ranks(2, life, tmp_path / "half", {"dp_shard": 2}):
        torch.testing.assert_close(found["first"], expected, atol=2e-6, rtol=0)


def kept_operators() -> set[str]:
    """Names of the operators whose results selective checkpointing keeps."""
    from nemorl.parallel.dtensor.titan import SelectiveAC, checkpoint_activations

    checkpoint_activations(tiny_model().get_decoder(), "selective")
    return {str(operator) for operator in SelectiveAC.Config().build().get_save_ops()}


def test_selective_checkpointing_knows_the_kernel_of_gpus():
    """Which PyTorch registers when it is first imported, perhaps later than layers are wrapped."""
    assert "torch_attn._varlen_attn.default" in run_ranks(1, kept_operators, fresh=True)[0]


def broken(folder: Path, target: Path) -> Path:
    """Without its output layer."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def stale(folder: Path, target: Path) -> Path:
    """With shards of an earlier model beside the present one."""
    tiny_model(scale=2.0, tied=False, seed=9).save_pretrained(target, max_shard_size="20KB")
    shutil.copy(folder / "model.safetensors", target)
    return target


def in_parts(folder: Path, target: Path) -> Path:
    tiny_model(scale=2.0, tied=False).save_pretrained(target, max_shard_size="20KB")
    assert not (target / "model.safetensors").exists()
    return target


@pytest.mark.parametrize("make", [stale, in_parts])
def test_the_files_are_those_that_transformers_takes(folder, alone, tmp_path, make):
    for found in run_ranks(2, life, make(folder, tmp_path / "model"), {"dp_shard": 2}):
        torch.testing.assert_close(found["first"], alone["first"], atol=1e-4, rtol=0)


def misshapen(folder: Path, target: Path) -> Path:
    """With another configuration than its weights."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | {"intermediate_size": 128}
    (target / "config.json").write_text(json.dumps(config))
    return target


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a weight is missing": (broken, {}, "lm_head.weight is missing (1 in all)"),
    "other shapes": (misshapen, {}, "gate_proj.weight is [64, 32], where [128, 32] is expected"),
    "no folder": (
        lambda folder, target: target / "nowhere",
        {},
        "model.path must be a folder with a Hugging Face model or a hub name",
    ),
    "no name": (lambda folder, target: "", {}, "model.path must name a model folder"),
    "too many devices": (
        lambda folder, target: folder,
        {"plan": {"tp": 4}},
        "parallel must divide the 2 devices that there are, but it is '4",
    ),
    "another number": (
        lambda folder, target: folder,
        {"plan": {"dp_shard": 3}},
        "must ask for the 2 devices that there are, but it is '3",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_refused(folder, tmp_path, case):
    make, options, message = REFUSED[case]
    for found in run_ranks(2, refusal, make(folder, tmp_path / "bad"), options):
        assert message in found


def test_heads_that_do_not_divide_are_named(tmp_path):
    tiny_model(num_attention_heads=3, num_key_value_heads=3).save_pretrained(tmp_path)
    found, _ = run_ranks(2, refusal, tmp_path, {"plan": {"tp": 2}})
    for name in ("num_attention_heads", "num_key_value_heads"):
        assert f"parallel.tp 2 does not divide the model's {name} 3" in found


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": 2}, "the 1 devices that there are"),
        ({"cpu_offload": True}, "needs a process started as a rank"),
        ({"compile": True}, "needs a process started as a rank"),
        ({"activation_checkpointing": "selective"}, "needs a process started as a rank"),
    ],
    ids=str,
)
def test_what_one_process_by_itself_refuses(folder, plan, message):
    with pytest.raises(ValueError, match=message):
        set_up(folder, plan=plan)

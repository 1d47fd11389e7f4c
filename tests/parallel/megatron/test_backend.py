"""What the conformance suite and parity don't see: checkpoints across backends and plans, float32
weights of a model in bfloat16, gradients added over batches.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from nemorl.models.tensor_files import sampled
from nemorl.parallel.fingerprint import hash_of
from nemorl.parallel.plan import ParallelPlan
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.saved import Carried, assert_same, contents
from tests.parallel.ways import LENGTHS, WAYS, start, train, weights
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model


def save(way: str, model: Path, checkpoint: Path) -> dict[str, Tensor]:
    backend = start(way, model)
    train(backend, 0, 1)
    backend.save_checkpoint(checkpoint)
    found = weights(backend)
    backend.shutdown()
    return found


def resume(way: str, model: Path, checkpoint: Path) -> tuple[dict, list[float], dict]:
    backend = start(way, model)
    backend.load_checkpoint(checkpoint)
    assert backend.step == 2
    before, losses = weights(backend), train(backend, 2, 3)
    after = weights(backend)
    backend.shutdown()
    return before, losses, after


def made() -> nn.Module:
    return tiny_model("qwen3", scale=2.0, tied=False, num_hidden_layers=5)


@pytest.fixture(scope="module")
def model() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        made().save_pretrained(folder)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["tp 2", "pp 2, 1 layer first", "FSDP2 2", "dp 2 in bfloat16"])
def test_every_plan_and_backend_goes_on_with_a_checkpoint(first, model, tmp_path: Path):
    saved = run_ranks(2, save, first, model, tmp_path)[0]
    ways = [way for way in WAYS if not way.startswith("ep")]
    results = {way: run_ranks(2, resume, way, model, tmp_path) for way in ways}
    _, expected, end = results["FSDP2 2"][0]
    for way, of_ranks in results.items():
        rounded = "bfloat16" in way
        for before, losses, after in of_ranks:
            torch.testing.assert_close(before, saved, atol=0, rtol=0)
            assert losses == pytest.approx(expected, abs=0.02 if rounded else 1e-6)
            if not rounded:
                torch.testing.assert_close(after, end, atol=2e-6, rtol=0)


def to_the_other_backend_and_back(folder: Path) -> tuple[set[str], list[list[float]]]:
    ways, bases, losses = ("FSDP2 2", "ep 2"), set[str](), []
    for way, other in (ways, ways[::-1]):
        for each, source in ((way, ""), (way, way), (other, way)):
            backend = start(each, folder / "model")
            bases.add(backend._base)
            if source:
                backend.load_checkpoint(folder / source)
                backend.save_checkpoint(folder / f"{source} by {each}")
                losses.append(train(backend, 2, 3))
            else:
                train(backend, 0, 1)
                backend.save_checkpoint(folder / way)
            backend.shutdown()
    return bases, losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_go_on_with_the_other_backend(kind: str, tmp_path: Path):
    tiny_model(kind, scale=2.0, tied=False).save_pretrained(tmp_path / "model")
    for bases, losses in run_ranks(2, to_the_other_backend_and_back, tmp_path):
        assert len(bases) == 1
        for each in losses[1:]:
            assert each == pytest.approx(losses[0], abs=1e-6)
    for way in ("FSDP2 2", "ep 2"):
        assert any("experts" in name for name in contents(tmp_path / way) if "exp_avg_sq" in name)
        for each in ("FSDP2 2", "ep 2"):
            assert_same(tmp_path / way, tmp_path / f"{way} by {each}")


def largest_calls(way: str, folder: Path) -> tuple[int, int]:
    backend = start(way, folder / "model")
    train(backend, 0)
    with Carried() as saving:
        backend.save_checkpoint(folder / "saved")
    with Carried() as exporting:
        all(True for _ in backend.weights())
    backend.shutdown()
    return saving.most, exporting.most


@pytest.mark.slow
@pytest.mark.parametrize("way", ["FSDP2 2", "tp 2", "pp 2", "dp 2 in bfloat16", "ep 2"])
def test_no_rank_gathers_what_others_write(way: str, tmp_path: Path):
    kind = "qwen3_moe" if way == "ep 2" else "qwen3"
    tiny_model(kind, hidden_size=256, intermediate_size=256).save_pretrained(tmp_path / "model")
    for saving, exporting in run_ranks(2, largest_calls, way, tmp_path):
        assert saving < 16_384 < exporting


def in_bfloat16(folder: Path) -> list[dict[str, Tensor]]:
    backend, found = start("dp 2 in bfloat16", folder), list[dict[str, Tensor]]()
    for _ in range(2):
        found.append(weights(backend))
        with patch.object(backend.optimizer, "gathered", side_effect=AssertionError):
            found.append({n: t.clone() for n, t in backend.weights(dtype=torch.bfloat16)})
        backend.train_step(random_batch(LENGTHS), nll_loss)
    backend.shutdown()
    return found


@pytest.mark.slow
def test_a_model_in_bfloat16_begins_with_the_files_float32(model: Path):
    expected = dict(made().named_parameters())
    for exact, rounded, later, rounded_later in run_ranks(2, in_bfloat16, model):
        for name, parameter in expected.items():
            assert torch.equal(exact[name], parameter)
            assert torch.equal(rounded[name], parameter.bfloat16())
            assert torch.equal(rounded_later[name], later[name].bfloat16())
        assert not all(torch.equal(later[name], expected[name]) for name in expected)


def in_two_parts(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch, found = random_batch(LENGTHS), []
    halves = [[0, 2, 4], [1, 3, 5]]
    for parts in ([range(len(LENGTHS))], halves):
        backend = start("dp 2", folder)
        for rows in parts:
            mask = torch.zeros(len(LENGTHS), 1)
            mask[list(rows)] = 1
            part = replace(batch, loss_weights=batch.loss_weights * mask)
            backend.forward_backward(part, nll_loss)
        backend.optim_step()
        found.append(weights(backend))
        backend.shutdown()
    return found[0], found[1]


def test_gradients_of_several_batches_add(model: Path):
    for whole, parts in run_ranks(2, in_two_parts, model):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


def base_of(way: str, folder: Path) -> str:
    backend = start(way, folder)
    found = backend._base
    backend.shutdown()
    return found


def bases_of(folder: Path) -> set[str]:
    WAYS["HSDP 2"] = ("dtensor", ParallelPlan(dp_replicate=2, dp_shard=1))
    WAYS["dtensor's tp 2"] = ("dtensor", ParallelPlan(dp_shard=1, tp=2))
    ways = ("tp 2", "pp 2, interleaved", "dp 2 in bfloat16", "FSDP2 2", "HSDP 2", "dtensor's tp 2")
    return {base_of(way, folder) for way in ways}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_have_one_fingerprint(tied: bool, tmp_path: Path):
    model = tiny_model("qwen2", tied=tied, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    samples = {
        name: (tuple(tensor.shape), sampled(tensor, side=32).numpy().tobytes())
        for name, tensor in model.state_dict().items()
    }
    for found in run_ranks(2, bases_of, tmp_path):
        assert found == {hash_of(samples)}


def frozen(folder: Path, base: str) -> tuple[Tensor, Tensor, dict[str, Tensor], bool]:
    batch = random_batch(LENGTHS)
    trained = start("dp 2 in bfloat16", folder)
    assert trained._base == base
    trained.save_checkpoint(folder / "saved")
    settings = {"trains": False, "same_initial_model_as": folder / "saved"}
    teacher = start("dp 2 in bfloat16", folder, **settings)
    found = [each.get_logprobs(batch).values for each in (trained, teacher)]
    parameters = list(teacher._stages.parameters())
    keeps = any(p.requires_grad or hasattr(p, "main_grad") for p in parameters)
    last = (weights(teacher), keeps or teacher.optimizer is not None)
    for each in (teacher, trained):
        each.shutdown()
    return (*found, *last)


@pytest.mark.slow
def test_what_does_not_train_has_no_optimizer_and_no_gradients(model: Path):
    base = run_ranks(2, base_of, "dp 2", model)[0]
    for trained, still, found, keeps in run_ranks(2, frozen, model, base):
        assert torch.equal(trained, still) and not keeps
        for name, parameter in made().named_parameters():
            assert torch.equal(found[name], parameter.bfloat16().float())

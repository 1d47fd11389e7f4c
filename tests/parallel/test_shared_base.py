"""Adapters of several backends over one base."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.parallel.accumulation import storage_of
from nemorl.parallel.dtensor.backend import DTensorBackend
from tests.parallel.batches import LENGTHS, random_batch
from tests.parallel.ways import set_up, step
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(scale=2.0).save_pretrained(path)
    return path


def backend(folder: Path, plan: Any, *, seed: int = 0, **lora: Any) -> DTensorBackend:
    lora = {"rank": 4, **lora}
    return set_up(None, folder, plan=plan, lora=lora, seed=seed, keep_reference=True)


def bases(made: DTensorBackend) -> set[int]:
    parameters = made._loaded().named_parameters()
    return {storage_of(each) for name, each in parameters if ".lora_" not in name}


def life(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    options: list[dict[str, Any]] = [{}, {"seed": 1, "rank": 2, "target_modules": ("q_proj",)}]
    alone = []
    for each in options:
        made = backend(folder, plan, **each)
        alone.append([step(made) for _ in range(3)])
        made.shutdown()
    first, second = (backend(folder, plan, **each) for each in options)
    turns = [(step(first), step(second)) for _ in range(3)]
    batch = random_batch(LENGTHS)
    found = {
        "equal": [list(each) for each in zip(*turns, strict=True)] == alone,
        "shared": len(bases(first) & bases(second)) / len(bases(first)),
        "reference": torch.equal(
            first.get_reference_logprobs(batch).values, second.get_reference_logprobs(batch).values
        ),
    }
    before, weights = second.get_logprobs(batch).values, dict(first.weights())
    first.offload()  # which leaves the other one usable
    found["offloaded"] = torch.equal(second.get_logprobs(batch).values, before)
    step(first)
    second.shutdown()  # which changes nothing of the first
    changed = [name for name, each in first.weights() if not torch.equal(each, weights[name])]
    found["changed"] = [name for name in changed if "norm" in name or "embed" in name]
    reference = first.get_reference_logprobs(batch).values
    third = backend(folder, plan)
    found["base"] = torch.equal(third.get_logprobs(batch).values, reference)
    return found


EXPECTED = {"equal": True, "reference": True, "offloaded": True, "changed": [], "base": True}


def test_backends_of_a_process_share_their_base(folder):
    assert life(folder, {}) == {**EXPECTED, "shared": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_backends_of_a_rank_share_their_base(folder, plan):
    for found in run_ranks(2, life, folder, plan):
        assert found == {**EXPECTED, "shared": 1.0}


def test_other_weights_and_given_models_are_not_shared(folder, tmp_path: Path):
    made = backend(folder, {})
    tiny_model(seed=5).save_pretrained(tmp_path / "other")
    assert not bases(made) & bases(backend(tmp_path / "other", {}))
    given = set_up(tiny_model(scale=2.0), lora={"rank": 4})
    assert not bases(made) & bases(given)
    given.shutdown()


def test_the_last_one_hands_its_model_back_merged(folder):
    first, second = backend(folder, {}), backend(folder, {}, seed=1)
    model = first.model
    for made in (first, second):
        step(made)
    weights = {name: each.clone() for name, each in first.weights()}
    second.shutdown()
    first.shutdown()
    torch.testing.assert_close(dict(model.named_parameters()), weights, atol=0, rtol=0)

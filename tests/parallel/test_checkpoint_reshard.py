"""A checkpoint is the same whatever plan wrote it, and every other plan goes on with it."""

import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.source import ModelSource
from nemorl.models.tensor_files import DamagedFile
from nemorl.parallel import checkpoint
from nemorl.parallel.dtensor.backend import DTensorBackend
from tests.parallel.saved import assert_same, contents, exported, on_all
from tests.parallel.ways import set_up, step
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

PLANS = {
    "alone": {},
    "fsdp 3": {"dp_shard": 3},
    "hsdp 2 x 1": {"dp_replicate": 2, "dp_shard": 1},
    "fsdp 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "cp 2, full checkpointing": {"dp_shard": 1, "cp": 2, "activation_checkpointing": "full"},
}
SAVED, NEXT = 2, 2
"""Steps before the checkpoint, and after it: the first depends on the weights, the second on the
optimizer's state, too.
"""


def backend(folder: Path, plan: dict[str, Any], **options: Any) -> DTensorBackend:
    optimizer = {"weight_decay": 0.1, "schedule": "linear"}
    return set_up(None, folder, plan=plan, optimizer=optimizer, total_steps=9, **options)


def save_and_go_on(root: Path, name: str, options: dict[str, Any]) -> list[float]:
    made = backend(root / "model", PLANS[name], **options)
    for _ in range(SAVED):
        step(made)
    made.save_checkpoint(root / name, background="tp" in name)
    losses = [step(made) for _ in range(NEXT)]
    made.wait_for_checkpoint()
    return losses


def load_and_go_on(root: Path, name: str, options: dict[str, Any]) -> dict[str, list[float]]:
    made, losses = backend(root / "model", PLANS[name], **options), {}
    for other in PLANS:
        if (root / other).exists():
            made.load_checkpoint(root / other)
            assert made.step == SAVED
            made.save_checkpoint(root / f"{other} by {name}")
            losses[other] = [step(made) for _ in range(NEXT)]
    return losses


def on(name: str, function: Any, *args: Any) -> Any:
    return on_all(PLANS[name], function, *args)


def stored_bytes(folder: Path, kind: str) -> int:
    return sum(
        sum(tensor.nbytes for tensor in load_file(path).values())
        for path in folder.glob(f"{kind}*.safetensors")
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("reshard")
    tiny_model(scale=2.0).save_pretrained(root / "model")
    return root, {name: on(name, save_and_go_on, root, name, {}) for name in PLANS}


@pytest.mark.parametrize(
    "name", [n if n == "alone" else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_any_plan_goes_on_from_any_other(saved, name):
    root, expected = saved
    found = on(name, load_and_go_on, root, name, {})
    assert found.keys() == expected.keys()
    for other, losses in expected.items():
        # float32 has a number every 2.4e-7 there
        assert found[other][0] == pytest.approx(losses[0], rel=5e-7), f"{name} from {other}"
        assert found[other][1] == pytest.approx(losses[1], rel=2e-6), f"{name} from {other}"
        assert_same(root / other, root / f"{other} by {name}")


@pytest.mark.slow
def test_all_plans_write_the_same(saved):
    root, (first, *others) = saved
    for other in others:
        assert_same(root / first, root / other, atol=2e-4)
        assert {path.suffix for path in (root / other).iterdir()} == {".json", ".safetensors"}
        for kind in ("optimizer", "[mw]"):
            assert stored_bytes(root / other, kind) == stored_bytes(root / first, kind)


@pytest.mark.slow
def test_transformers_loads_what_any_plan_wrote(saved):
    root, expected = saved
    for name in expected:
        folder = root / name if name == "alone" else exported(root / name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = contents(root / name)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), found[key], atol=0, rtol=0)


@pytest.mark.slow
def test_pieces_are_not_taken_for_a_model(saved):
    folder = saved[0] / "fsdp 3"
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    said = "checkpoint of several ranks, .*: nemorl export writes a model of them"
    for use in (lambda: load_causal_lm(str(folder)), lambda: next(ModelSource(folder).weights())):
        with pytest.raises(ValueError, match=said):
            use()


ADAPTED = {"lora": {"rank": 4, "alpha": 8.0}, "keep_reference": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [("cp 2, full checkpointing", ADAPTED), ("fsdp 2 x tp 2", {})],
)
def test_adapters_and_untied_embeddings_go_from_plan_to_plan(tmp_path: Path, ranks, options):
    tiny_model(scale=2.0, tied=bool(options)).save_pretrained(tmp_path / "model")
    names = ["alone", ranks]
    expected = {name: on(name, save_and_go_on, tmp_path, name, options) for name in names}
    for name in names:
        found = on(name, load_and_go_on, tmp_path, name, options)
        for other in names:
            assert found[other] == pytest.approx(expected[other], rel=5e-7)
            assert_same(tmp_path / other, tmp_path / f"{other} by {name}")


def meet_damage(root: Path, file: str) -> str:
    made = backend(root / "model", {"dp_shard": 2})
    step(made)
    made.save_checkpoint(root / "first")
    expected = {name: tensor.clone() for name, tensor in made.weights()}
    step(made)
    made.save_checkpoint(root / "second")
    if made.world.rank == 0:
        content = bytearray((root / "second" / file).read_bytes())
        content[-1] ^= 1
        (root / "second" / file).write_bytes(content)
    made.world.merge_objects(None, lambda first, other: first)  # not before that is done
    with pytest.raises(DamagedFile) as caught:
        made.load_checkpoint(root / "second")
    made.load_checkpoint(root / "first")
    assert made.step == 1
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.weights())
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "optimizer"])
def test_damage_that_one_rank_reads_is_raised_by_all(tmp_path: Path, kind):
    tiny_model().save_pretrained(tmp_path / "model")
    file = f"{kind}-00002-of-00002.safetensors"
    first, second = run_ranks(2, meet_damage, tmp_path, file)
    assert first == second and f"{file} is damaged (its CRC-32" in first


def fail_on_the_second(root: Path, how: str, background: bool) -> str:
    made = backend(root / "model", {"dp_shard": 2})
    step(made)
    made.save_checkpoint(root / "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if made.world.rank == 1 and how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    if made.world.rank == 1 and how == "not one folder":
        os.chdir(root / "elsewhere")
    with pytest.raises(OSError) as caught:
        made.save_checkpoint(Path("saved"), background=background)
        step(made)
        made.wait_for_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made.wait_for_checkpoint()  # for nothing
    made.save_checkpoint(root / "after")  # and the next one is written
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_is_named_by_all(tmp_path: Path, monkeypatch, background):
    tiny_model().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(2, fail_on_the_second, tmp_path, "full disk", background)
    assert first == second and re.search(r"rank 1 of 2 on .*: \[Errno 27\] File too l", first)
    assert contents(tmp_path / "before").keys() == contents(tmp_path / "after").keys()


def test_ranks_that_do_not_share_the_folder_say_so(tmp_path: Path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for message in run_ranks(2, fail_on_the_second, tmp_path, "not one folder", False):
        assert "is not the folder that the other ranks see: put the run in one" in message


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch):
    tiny_model(scale=2.0).save_pretrained(tmp_path / "model")
    made, plain = (backend(tmp_path / "model", {}) for _ in range(2))
    step(made), step(plain)
    plain.save_checkpoint(tmp_path / "at once")
    gate, write = threading.Event(), checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *args: gate.wait(60) and write(*args))
    made.save_checkpoint(tmp_path / "meanwhile", background=True)
    losses = [step(made) for _ in range(2)]
    assert not list((tmp_path / "meanwhile").glob("*.safetensors"))
    gate.set()
    made.wait_for_checkpoint()
    assert_same(tmp_path / "at once", tmp_path / "meanwhile")
    assert losses == [step(plain) for _ in range(2)]


@pytest.mark.slow
def test_a_checkpoint_in_the_place_of_another_plans(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path / "model")
    on("fsdp 3", save_and_go_on, tmp_path, "fsdp 3", {})
    made = backend(tmp_path / "model", {})
    step(made)
    made.save_checkpoint(tmp_path / "fsdp 3")
    assert sorted(path.name for path in (tmp_path / "fsdp 3").iterdir()) == [
        "backend.json",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]

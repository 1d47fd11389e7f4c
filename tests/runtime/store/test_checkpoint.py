"""A checkpoint is whole or not there, whatever happens while it is written."""

import os
import pickle
import random
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemorl.models.tensor_files import checksum, read_manifest, write_manifest
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.checkpoint import CheckpointError, seed_generators
from tests.runtime.tiny import TinyTrainer, flip_a_bit, save, seed_everything, tiny_run

SMALL_FILES = ("state.json", "rng.json", "rng.safetensors")


def saved(directory: Path, *steps: int, keep: int = 9) -> list[Path]:
    """One checkpoint for each step, whose weights are the step's number."""
    return [save(directory, tiny_run(step=step, value=step), keep=keep) for step in steps]


def loaded(path: Path) -> tuple[int, float]:
    """Step and weight of a checkpoint."""
    run = tiny_run()
    state = checkpoint.load(path, run.config, run.trainer)
    return state.step, float(run.trainer.tensors["weight"][0])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_everything_comes_back(tmp_path):
    run = tiny_run(step=3, value=0.5)
    run.trainer.train_step()
    path = save(tmp_path, run)
    assert path == tmp_path / "checkpoints" / "step_3" == checkpoint.latest(tmp_path)
    other = tiny_run()
    assert checkpoint.load(path, other.config, other.trainer) == run.state
    for name, tensor in run.trainer.tensors.items():
        assert torch.equal(other.trainer.tensors[name], tensor)


def test_random_generators_come_back_bit_for_bit(tmp_path):
    seed_everything(1)
    # Leaves a second Gaussian waiting in Python's and numpy's generators.
    random.gauss(0, 1), np.random.standard_normal()

    def draw():
        numbers = np.random.standard_normal(5).tolist(), np.random.rand()
        return random.gauss(0, 1), random.random(), *numbers, torch.randn(20).tolist()

    run = tiny_run(step=1)
    path = save(tmp_path, run)
    expected = draw()
    seed_everything(99)
    checkpoint.load(path, run.config, run.trainer)
    assert draw() == expected


@pytest.mark.gpu
def test_random_generators_of_gpus_come_back(tmp_path):
    """CUDA's own generators; the test before this one has the CPU's."""
    torch.cuda.manual_seed_all(1)
    torch.randn(3, device="cuda")
    run = tiny_run(step=1)
    path = save(tmp_path, run)
    expected = torch.randn(20, device="cuda")
    torch.cuda.manual_seed_all(99)
    checkpoint.load(path, run.config, run.trainer)
    assert torch.equal(torch.randn(20, device="cuda"), expected)
    assert "cuda:0" in load_file(path / "rng.safetensors")


@pytest.mark.slow_cases("background", "replace")
@pytest.mark.parametrize("scenario", ["next", "background", "replace"])
def test_killed_at_any_point_of_writing(forked, tmp_path, scenario):
    """next: step 2 follows step 1, background: in threads. replace: step 2 is written again by a
    run that went back to step 1.
    """
    command = [forked / "python", "-m", "tests.runtime.tiny", scenario, str(tmp_path)]
    places = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert places > 20
    seen = set()
    for place in range(1, places):
        folder = tmp_path / str(place)
        died = (folder / "died.txt").read_text()
        checkpoint.sweep(folder)
        step, value = loaded(checkpoint.latest(folder))
        seen.add(value)
        assert (step, value) in (
            [(1, 1.0), (2, 2.0), *([(2, 1.0)] if scenario == "replace" else ())]
        ), died
        if scenario != "replace":
            assert (folder / "checkpoints" / "latest").read_text() == f"step_{step}\n", (
                f"what `latest` names is in force: {died}"
            )
        assert [name for name in names(folder) if name.startswith(".")] == [], died
        save(folder, tiny_run(step=2, value=5.0), keep=2)
        assert loaded(checkpoint.latest(folder)) == (2, 5.0), died
    assert seen == {1.0, 2.0}


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "a bit flipped": (flip_a_bit, "CRC-32"),
    "zeroed": (zero, "CRC-32"),
    "cut": (cut_in_half, "bytes instead of"),
    "missing": (Path.unlink, "can't be read"),
}


@pytest.mark.parametrize(
    "file", ["policy/model.safetensors", "policy/optimizer.safetensors", *SMALL_FILES]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_passed_over_with_the_reason(tmp_path, file, damage):
    first, second = saved(tmp_path, 1, 2)
    harm, reason = DAMAGES[damage]
    harm(second / file)
    run = tiny_run(value=7)
    with pytest.raises(CheckpointError, match=rf"step_2 is not used: .*{file}.*{reason}"):
        checkpoint.load(second, run.config, run.trainer)
    assert float(run.trainer.tensors["weight"][0]) == 7, "it changes nothing"
    with pytest.warns(UserWarning, match=rf"step_2 is not used: .*{file}.*{reason}"):
        assert checkpoint.latest(tmp_path) == first
    with pytest.warns(UserWarning, match=r"Trying an older one"):
        path, state = checkpoint.load_latest(tmp_path, run.config, run.trainer)
    assert (path, state.step, float(run.trainer.tensors["weight"][0])) == (first, 1, 1.0)


@pytest.mark.parametrize("text", ["{", '{"format": 4, "files": {"state.json": {"size": 3}}}'])
def test_damaged_manifest_is_passed_over(tmp_path, text):
    first, second = saved(tmp_path, 1, 2)
    (second / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match=r"manifest.json is missing or damaged"):
        assert checkpoint.latest(tmp_path) == first


@pytest.mark.parametrize("text", ["[1]", '{"1": 3}', "{"])
def test_damaged_measurements_count_as_none(tmp_path, text):
    saved(tmp_path, 1)
    (tmp_path / "checkpoints" / "metrics.json").write_text(text)
    assert checkpoint.metrics_by_step(tmp_path) == {1: {}}


def test_without_any_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    checkpoint.sweep(tmp_path)
    (only,) = saved(tmp_path, 1)
    (only / "state.json").unlink()
    with pytest.warns(UserWarning, match=r"state.json can't be read"):
        assert checkpoint.load_latest(tmp_path, BaseConfig(), TinyTrainer()) is None


@pytest.mark.parametrize("pointer", ["step_9\n", "", "../..", "step_1"])
def test_pointer_decides_if_it_can(tmp_path, pointer):
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "latest").write_text(pointer)
    assert checkpoint.latest(tmp_path).name == ("step_1" if pointer == "step_1" else "step_2")


def test_only_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert names(tmp_path) == ["latest", "step_10", "step_3"]
    saved(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["latest", "step_2"], "later ones are of a run that went back"


def test_leftovers_are_swept(tmp_path):
    saved(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in (f".tmp-step_2-{os.getpid()}", ".tmp-step_3"):
        (folder / name).mkdir()
    for place in (folder, tmp_path):
        (place / f".tmp-latest-{os.getpid()}").write_text("step")
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["latest", "step_1"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("limit", [0, 300, 9000])
def test_disk_that_takes_no_more(tmp_path, limit):
    """A limit on the size of files stands in for a full disk, in whatever library."""
    saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            saved(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step_2 could not be written" in str(caught.value)
    assert "The previous one, if any, is intact" in str(caught.value)
    assert names(tmp_path) == ["latest", "step_1"]
    assert loaded(checkpoint.latest(tmp_path)) == (1, 1.0)


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a pickle")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    (path,) = saved(tmp_path, 1)
    assert loaded(checkpoint.latest(tmp_path)) == (1, 1.0)
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


class Checking(TinyTrainer):
    """One that writes a manifest of its own, and checks its files itself."""

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        super().save_checkpoint(path)
        write_manifest(path, {file.name: checksum(file) for file in path.glob("*.safetensors")})

    def load_checkpoint(self, path: Path) -> None:
        if read_manifest(path)["model.safetensors"] != checksum(path / "model.safetensors"):
            raise OSError("model.safetensors is damaged")
        super().load_checkpoint(path)


def test_files_that_the_trainer_checks_are_not_read_besides(tmp_path):
    for step in (1, 2):
        path = save(tmp_path, replace(tiny_run(step=step, value=step), trainer=Checking()))
    assert {*read_manifest(path)} == {"policy/manifest.json", *SMALL_FILES}
    flip_a_bit(path / "policy" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        checkpoint.verify(path)
    run = replace(tiny_run(), trainer=Checking())
    with pytest.warns(UserWarning, match=r"step_2 is not used: .*model.safetensors is damaged"):
        found = checkpoint.load_latest(tmp_path, run.config, run.trainer)
    assert found == (tmp_path / "checkpoints" / "step_1", tiny_run(step=1).state)


@pytest.mark.parametrize("seed", [0, 2**40])
def test_a_seed_is_that_of_every_generator(seed: int):
    def draws(seed: int) -> tuple[float, float, float]:
        seed_generators(seed)
        return random.random(), float(np.random.random()), torch.rand(()).item()

    first, again, other = draws(seed), draws(seed), draws(seed + 1)
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))

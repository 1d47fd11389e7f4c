"""Ranks as Ray actors, with real collectives between them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from nemorl.losses.types import finalize
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.run.devices import Devices
from nemorl.runtime.store.files import WorkerDied, WorkerError, WorkerTimeout
from nemorl.runtime.workers import worker
from nemorl.runtime.workers.cluster import ResourcesError
from tests.parallel.batches import random_batch
from tests.ray_session import NUM_CPUS, ray_cpus
from tests.runtime.ranks import backends
from tests.runtime.workers.processes import alive, soon_gone

pytestmark = pytest.mark.xdist_group("ray")
BATCH = random_batch([3, 4])


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def trainer(trainers, logs: Path):
    """Shared by the tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOMP_SPINCOUNT", "7")  # Ray, which runs already, has another
        return trainers(cpus_per_rank=1, logs=logs)


def pids(trainer) -> list[int]:
    return [trainer._ranks.group.workers.info(rank).pid for rank in range(2)]


def loss(metrics) -> float:
    return finalize(metrics)["loss"]


def test_every_rank_has_its_place(trainer, logs: Path):
    found = trainer._call("environment")
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7"}
    assert expected.items() <= found.items()
    assert found["pid"] == pids(trainer)[0] and found["threads"] == 1
    assert found["group"] != os.getpgrp(), "Ctrl-C in the terminal is not theirs"
    assert (logs / "rank-1.log").read_text().startswith(f"--- rank 1, process {pids(trainer)[1]} ")


def test_what_all_raise_is_raised_here_and_they_stay_usable(trainer):
    step = trainer.step
    with pytest.raises(
        FloatingPointError, match=r"^the loss must be finite, but it is nan on rank 0\n"
    ) as caught:
        trainer.train_step(BATCH, backends.raising)
    assert "in raising" in caught.value.__notes__[0] and trainer.step == step
    with pytest.raises(WorkerError, match=r"^Own: mine\n"):
        trainer.train_step(BATCH, backends.raising_own)
    with pytest.raises(RuntimeError, match=r"^no reference\n"):
        trainer.get_reference_logprobs(BATCH)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


@pytest.mark.slow
def test_weights_come_whole_and_may_be_left_at_any_point(trainer):
    trainer.train_step(BATCH, backends.rank_number)
    found = dict(trainer.weights())
    assert list(found) == [*(f"large.{i}" for i in range(8)), "total"]
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2)), (
        "summed over both ranks, and none overwritten by a later bucket"
    )
    dtypes = {tensor.dtype for _, tensor in trainer.weights(dtype=torch.bfloat16)}
    assert dtypes == {torch.bfloat16, torch.float32}
    for _ in range(3):
        assert next(iter(trainer.weights()))[0] == "large.0"
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


@pytest.mark.slow
def test_weights_of_before_a_step_are_not_given_after_it(trainer):
    weights = trainer.weights()
    next(weights)
    trainer.train_step(BATCH, backends.rank_number)
    with pytest.raises(RuntimeError, match="before the trainer's next step"):
        next(weights)
    weights = trainer.weights()
    next(weights)
    assert len(dict(trainer.weights())) == 9
    with pytest.raises(RuntimeError, match="next step or export"):
        next(weights)


def test_rank_zero_sends_its_weights_itself(trainer):
    def sums(weights):
        return os.getpid(), {name: (float(x.float().mean()), x.dtype) for name, x in weights}

    pid, found = trainer.send_weights(sums, dtype=torch.bfloat16)
    assert pid == pids(trainer)[0]
    assert [found[f"large.{i}"] for i in range(8)] == [(2.0 * i, torch.bfloat16) for i in range(8)]
    assert trainer.send_weights(next)[0] == "large.0"
    with pytest.raises(ZeroDivisionError):
        trainer.send_weights(lambda weights: 1 / 0)
    assert loss(trainer.train_step(BATCH, backends.rank_number)) == 3


@pytest.mark.slow
def test_checkpoints_are_found_from_anywhere(
    trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    step = trainer.step
    trainer.save_checkpoint(Path("saved"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["rank-0", "rank-1"]
    trainer.train_step(BATCH, backends.rank_number)
    trainer.load_checkpoint(Path("saved"))
    assert trainer.step == step


@pytest.mark.slow
def test_a_failed_setup_leaves_no_process(trainers, tmp_path: Path):
    with pytest.raises(ValueError, match="seed must be a lucky number, but it is 13: take another"):
        trainers(seed=13, logs=tmp_path)
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert soon_gone(*(int(log.split("process ")[1].split()[0]) for log in logs))
    with pytest.raises(WorkerDied) as caught:
        trainers(seed=666)
    assert "rank 1 (process" in str(caught.value) and "died in setup" in str(caught.value)
    assert "what killed it" in str(caught.value), "the end of its log"


@pytest.mark.slow
def test_a_killed_rank_is_named_and_all_are_ended(trainers):
    trainer = trainers()
    before, child = pids(trainer), trainer._call("spawn")
    trainer.train_step(BATCH, backends.rank_number)
    with pytest.raises(WorkerDied) as caught:
        trainer.train_step(BATCH, backends.killed)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"rank 1 (process {before[1]} on ")
    assert "rank-1.log) died in train_step of optimizer step 2: it was killed" in first
    assert first.endswith("; its log ends:") and soon_gone(*before, child)
    with pytest.raises(RuntimeError, match="has no model: its ranks were ended: rank 1 "):
        trainer.get_logprobs(BATCH)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_its_stack_is_in_the_log(trainers, tmp_path: Path):
    trainer = trainers(timeout_s=2, logs=tmp_path)
    before = pids(trainer)
    with pytest.raises(WorkerTimeout) as caught:
        trainer.train_step(BATCH, backends.asleep)
    text = str(caught.value)
    assert "no answer to train_step of optimizer step 1 within 2 s (runtime.timeout_s; " in text
    assert f"rank 1 (process {before[1]} on " in text and str(tmp_path / "rank-1.log") in text
    assert soon_gone(*before)
    log = (tmp_path / "rank-1.log").read_text()
    assert re.search(r'File ".*backends.py", line \d+ in asleep', log)
    assert "in all_reduce" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_all(trainers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "ALONE_S", 1.0)
    trainer = trainers()
    before = pids(trainer)
    with pytest.raises(ZeroDivisionError, match="only here") as caught:
        trainer.train_step(BATCH, backends.raising_alone)
    assert any(
        "but not by the other ranks: all were ended" in note for note in caught.value.__notes__
    )
    assert soon_gone(*before)


@pytest.mark.slow
def test_ranks_and_engines_that_do_not_fit_together_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    ray_cpus()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    config = BaseConfig(parallel=ParallelPlan(dp_shard=2))
    devices = Devices.of(config, {}, num_gpus=0)
    devices.check_cluster(GenerationConfig(backend="vllm", num_replicas=1))
    message = r"^parallel and generation\.num_replicas must leave room for all: bundles must fit"
    with pytest.raises(ResourcesError, match=message):
        devices.check_cluster(GenerationConfig(backend="vllm", num_replicas=NUM_CPUS - 1))


@pytest.fixture
def shared() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


@pytest.mark.slow
def test_ctrl_c_is_the_drivers_alone_and_a_kill_leaves_nothing(
    shared, model_folder: Path, tmp_path: Path
):
    """Both while its ranks are in a step; the terminal sends Ctrl-C to the whole group."""
    command = [sys.executable, "-m", "tests.runtime.ranks.driver", str(model_folder), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            family = [int(pid) for pid in process.stdout.readline().split()]
            commands = {pid: psutil.Process(pid).cmdline() for pid in family}
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.stdout.readline() == "loss 3.0\n"
            time.sleep(0.5)
        finally:
            process.kill()
    assert len(family) > 3
    assert soon_gone(*family), [commands[pid] for pid in alive(*family)]
    left = set(Path("/dev/shm").iterdir()) - shared
    assert not [path for path in left if path.name.startswith(("plasma", "ray", "torch"))]

"""Ranks as workers of a Ray cluster."""

import time

import pytest
import torch

from nemorl.losses.types import finalize
from nemorl.runtime.cluster.placement import ResourcesError
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.ray_ranks import RayRank, RayRankGroup
from nemorl.runtime.ranks.wire import dumps, loads
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout
from tests.parallel.batches import random_batch
from tests.ray_session import ray_cpus
from tests.runtime.cluster.processes import alive, soon_gone
from tests.runtime.ranks import backends

BATCH = random_batch([3, 4])


@pytest.fixture(autouse=True)
def session() -> None:
    ray_cpus()


def pids(trainer) -> list[int]:
    return [trainer._group.place(rank).pid for rank in range(2)]


@pytest.mark.parametrize("transport", ["shared_memory", "object_store"])
def test_it_is_the_same_backend(
    trainers, tmp_path, monkeypatch: pytest.MonkeyPatch, transport: str
):
    if transport == "object_store":  # as where rank 0 is on another machine than the driver
        monkeypatch.setattr(
            "nemorl.runtime.cluster.placement.RayVirtualCluster.driver_node", "another"
        )
    trainer = trainers("ray", logs=tmp_path, cpus_per_rank=1)
    for step in range(2):
        assert (
            finalize(trainer.train_step(BATCH, lambda rank, batch: rank + 1))["loss"] == 3
            and trainer.step == step + 1
        )
    with pytest.raises(
        FloatingPointError, match=r"^the loss must be finite, but it is nan on rank 0\n"
    ):
        trainer.train_step(BATCH, backends.raising)
    assert next(trainer.export_weights())[0] == "large.0"
    found = dict(trainer.export_weights(dtype=torch.bfloat16))
    assert [float(found[f"large.{i}"].mean()) for i in range(8)] == list(range(0, 16, 2)) and found[
        "large.0"
    ].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="pickle"):
        trainer._call("lock")
    trainer.save_checkpoint(tmp_path / "saved", background=True)
    trainer.load_checkpoint(make_checkpoint(trainer, tmp_path))
    trainer.wait_for_checkpoint()
    before = pids(trainer)
    assert trainer._call("environment")["pid"] == before[0] and "--- rank-1" in (
        tmp_path / "rank-1.log"
    ).read_text(encoding="utf-8")
    trainer.shutdown()
    assert soon_gone(*before) and "shut down in order" in (tmp_path / "rank-0.log").read_text(
        encoding="utf-8"
    )


def make_checkpoint(trainer, folder):
    trainer.save_checkpoint(folder / "whole")
    return folder / "whole"


def test_a_killed_worker_is_named(trainers):
    trainer = trainers("ray")
    before = pids(trainer)
    with pytest.raises(WorkerDied) as caught:
        trainer.train_step(BATCH, backends.killed)
    first = str(caught.value).splitlines()[0]
    assert (
        first.startswith(f"rank 1 (process {before[1]} on ")
        and ") died in train_step of optimizer step 1: it was killed" in first
    )
    assert "rank-1.log and ends:" in first and alive(*before) == []


def test_a_worker_that_hangs_is_named(trainers):
    trainer = trainers("ray", timeout_s=2)
    before, start = pids(trainer), time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        trainer.train_step(BATCH, backends.asleep)
    assert time.monotonic() - start < 40 and alive(*before) == []
    lines = str(caught.value).splitlines()
    assert (
        lines[0].startswith(f"rank 1 (process {before[1]} on ")
        and "hung in train_step of optimizer step 1: no answer within 2 s" in lines[0]
    )
    assert "torch/distributed/" in lines[1] and " asleep < " in lines[2]


def test_ranks_that_do_not_fit_are_refused(trainers):
    with pytest.raises(
        ResourcesError,
        match=r"^parallel asks for 2 ranks of 1000 CPUs and 0 GPUs each: bundles must fit",
    ):
        trainers("ray", cpus_per_rank=1000)


def test_calls_are_performed_in_their_order_though_they_come_in_another(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("RANK", "0")
    from concurrent.futures import ThreadPoolExecutor

    rank, order = RayRank(dumps(backends.Summing), "shared_memory"), []
    monkeypatch.setattr(rank._rank, "perform", lambda method, args, kwargs: order.append(method))
    with ThreadPoolExecutor(3) as pool:
        late = [
            pool.submit(rank.perform, ticket, f"call {ticket}", dumps(((), {})))
            for ticket in (2, 1)
        ]
        time.sleep(0.2)
        assert order == []
        pool.submit(rank.perform, 0, "call 0", dumps(((), {})))
        assert [loads(one.result(10)) for one in late] == [None, None]
    assert order == ["call 0", "call 1", "call 2"]


def test_gpus_that_the_cluster_does_not_have(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(
        ValueError,
        match=(
            r"trainer.device must be cpu on a Ray cluster without GPUs, but it is 'cuda': leave"
            r" it out"
        ),
    ):
        RayRankGroup("summing", 2, device="cuda", log_dir=tmp_path, runtime=RuntimeConfig())

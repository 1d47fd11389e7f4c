"""On which devices a run trains, and what is refused before anything starts."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

import nemorl
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.engines.spec import VLLM_CPU_HEADS
from nemorl.runtime.run import devices
from nemorl.runtime.run.devices import Devices
from nemorl.runtime.workers import cluster
from tests.ray_session import NUM_GPUS, ray_cpus
from tests.tiny_models import tiny_model

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(devices, "_cluster_has_gpus", lambda address: False)


OFFLOAD = nemorl.TrainerConfig(offload_during_generation=True)


def config(
    *, plan: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, **options: Any
) -> nemorl.SFTConfig:
    return nemorl.SFTConfig(
        parallel=ParallelPlan(**(plan or {})),
        runtime=nemorl.RuntimeConfig(**(runtime or {})),
        **options,
    )


@pytest.mark.parametrize(
    ("plan", "runtime", "environ", "dp_shard", "ranked"),
    [
        ({}, {}, {}, 1, False),
        ({"tp": 2}, {}, {}, 1, True),
        ({"dp_shard": 2}, {}, {"RAY_ADDRESS": "auto"}, 2, True),
        ({"cpu_offload": True}, {"max_restarts": 2, "cpus_per_rank": 2}, {}, 1, True),
        ({}, {}, TORCHRUN, 4, True),
        ({"tp": 2}, {}, TORCHRUN, 2, True),
        ({"tp": 4}, {"tp_across_nodes": True}, TORCHRUN, 1, True),
        ({}, {}, {**TORCHRUN, "WORLD_SIZE": "1"}, 1, True),
    ],
)
def test_whose_processes_have_the_devices(plan, runtime, environ, dp_shard, ranked):
    found = Devices.of(config(plan=plan, runtime=runtime), environ, num_gpus=0)
    assert (found.plan.dp_shard, found.ranked) == (dp_shard, ranked)
    assert found.torchrun is ("RANK" in environ)
    assert found.placed is (ranked and not found.torchrun)


@pytest.mark.parametrize(
    ("options", "environ", "gpus", "message"),
    [
        ({"plan": {"tp": 3}}, TORCHRUN, 0, r"parallel must divide the 4 devices .* '3 = dp_replic"),
        (
            {"runtime": {"max_restarts": 1}},
            TORCHRUN,
            0,
            r"runtime.max_restarts is not for runs under torchrun.*--max-restarts",
        ),
        (
            {
                "runtime": {"timeout_s": 300},
                "generation": nemorl.GenerationConfig(backend="vllm"),
            },
            TORCHRUN,
            0,
            r"generation.timeout_s must be below runtime.timeout_s \(300\) where ranks send the"
            r" weights, but it is 300.0: lower it, or raise that one",
        ),
        (
            {"trainer": nemorl.TrainerConfig(device="cuda")},
            TORCHRUN,
            0,
            r"trainer.device must be cpu where the ranks have one each, but it is 'cuda'",
        ),
        (
            {"plan": {"tp": 2}, "runtime": {"cpus_per_rank": 99_999}},
            {},
            0,
            r"runtime.cpus_per_rank must be at most the \d+ CPU cores",
        ),
        (
            {"trainer": OFFLOAD},
            {},
            0,
            r"trainer.offload_during_generation needs a GPU that trains: .* but it is True: remove",
        ),
        ({}, TORCHRUN, 1, r"parallel must ask for at most the 1 GPUs .* it is 2"),
        (
            {"plan": {"tp": 4}},
            {},
            2,
            r"parallel must ask for at most the 2 GPUs that this machine has, but it is 4",
        ),
        (
            {"plan": {"tp": 4}},
            TORCHRUN,
            0,
            r"parallel.tp must divide the 2 processes of each machine, so that a group is on one,"
            r" but it is 4: .*--runtime.tp-across-nodes",
        ),
        (
            {},
            {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"},
            0,
            r"run.dir must be given where torchrun may start the run again",
        ),
    ],
)
def test_refused_before_anything_starts(options, environ, gpus, message):
    with pytest.raises(ValueError, match=message):
        Devices.of(config(**options), environ, num_gpus=gpus)


@pytest.mark.parametrize(
    ("plan", "device", "environ", "gpus", "taken", "free"),
    [
        ({}, None, {}, 8, 1, 7),
        ({"dp_shard": 4}, None, {}, 8, 0, 7),
        ({"tp": 4}, None, {}, 4, 0, None),
        ({"tp": 4}, None, {"RAY_ADDRESS": "auto"}, 2, 0, None),
        ({}, None, TORCHRUN, 8, 2, 7),
        ({"tp": 2}, None, TORCHRUN, 3, 2, 2),
        ({"dp_shard": 4}, "cpu", {}, 8, 0, 7),
    ],
)
def test_gpus_that_engines_leave_alone(plan, device, environ, gpus, taken, free, monkeypatch):
    """And a free one, on which nothing trains."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    trainer = nemorl.TrainerConfig(device=device)
    found = Devices.of(config(plan=plan, trainer=trainer), environ, num_gpus=gpus)
    assert (found.local_gpus, found.free_gpu) == (taken, free)


def test_the_plan_must_suit_the_model():
    found = Devices.of(config(plan={"tp": 4, "dp_shard": 2}), {}, num_gpus=0)
    with pytest.raises(ValueError, match=r"does not divide the model's num_key_value_heads 2"):
        found.check_model(tiny_model().config)
    found.check_model(tiny_model(num_key_value_heads=4, vocab_size=64).config)
    found.check_model(None)  # loading it will say what is wrong


def test_a_restart_by_torchrun_is_seen():
    given = replace(config(), run=nemorl.RunConfig(dir="runs/mine"))
    environ = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert not Devices.of(given, environ, num_gpus=0).restarted
    assert Devices.of(given, {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}, num_gpus=0).restarted


def test_vllm_on_cpus_has_kernels_for_some_heads_only():
    sampled = nemorl.GRPOConfig(generation=nemorl.GenerationConfig(backend="vllm"))
    eight, wide = tiny_model().config, tiny_model(hidden_size=128, head_dim=32).config
    found = Devices.of(sampled, {}, num_gpus=0)
    with pytest.raises(ValueError, match=r"must be torch on CPUs for a model with .* of 8 dimens"):
        found.check_model(eight)
    found.check_model(wide)
    for environ, gpus in (({}, 1), ({"RAY_ADDRESS": "auto"}, 0)):
        Devices.of(sampled, environ, num_gpus=gpus).check_model(eight)
    Devices.of(config(), {}, num_gpus=0).check_model(eight)


def test_engines_on_the_gpus_of_ranks_are_as_many_as_these_hold(monkeypatch):
    monkeypatch.setattr(devices, "_cluster_has_gpus", lambda address: True)

    def start(environ, gpus, **generation):
        given = nemorl.GenerationConfig(backend="vllm", **generation)
        grpo = replace(nemorl.GRPOConfig(generation=given), parallel=ParallelPlan(dp_shard=4))
        return Devices.of(grpo, environ, num_gpus=gpus)

    for environ, gpus in (({}, 8), (ELSEWHERE, 0)):
        found = start(environ, gpus, num_replicas=2, tensor_parallel_size=2)
        assert found.placed and found.shares_gpus(found.config.generation)
        for options in ({"num_replicas": 5}, {"num_replicas": 3, "pipeline_parallel_size": 2}):
            with pytest.raises(ValueError, match=r"num_replicas must be at most [42] where replic"):
                start(environ, gpus, **options)
        start(environ, 8, num_replicas=1, colocated=False)
    start(ELSEWHERE, 0, num_replicas=9, colocated=False)


def test_more_engines_than_devices_are_known_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # not the cluster of other tests

    def start(environ=None, gpus=4, plan=None, **generation):
        given = nemorl.GenerationConfig(backend="vllm", **generation)
        sampled = replace(nemorl.GRPOConfig(generation=given), parallel=ParallelPlan(**plan or {}))
        Devices.of(sampled, environ or {}, num_gpus=gpus)

    apart, two = {"colocated": False}, {"num_replicas": 2, "tensor_parallel_size": 2}
    start(**two)
    start(**two, **apart, trainer_gpus=0)
    start(**two, gpus=0, cpus_per_replica=2)
    start({"RAY_ADDRESS": "auto"}, num_replicas=9)
    for refused, there, needed in (
        (two | {"num_replicas": 3}, "4 GPUs", 6),
        (two | apart, "3 GPUs", 4),
        ({"num_replicas": 3, **apart, "plan": {"dp_shard": 2}}, "2 GPUs", 3),
        ({"num_replicas": 3, "cpus_per_replica": 3}, "8 CPU cores", 9),
    ):
        message = f"generation.num_replicas .* at most the {there} .*, but it is {needed}: lower it"
        with pytest.raises(ValueError, match=message):
            start(**refused)


def test_vllms_kernels_are_as_written_here():
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert tuple(attention.CPUAttentionBackend.get_supported_head_sizes()) == VLLM_CPU_HEADS


@pytest.mark.parametrize(
    ("ranks", "cpus_per_rank", "environ", "fits"),
    [(2, 1, {}, True), (9, 1, {}, False), (2, 2, {}, False), (9, 1, {"RAY_ADDRESS": "auto"}, True)],
)
def test_more_ranks_than_cores_only_if_asked_for(ranks, cpus_per_rank, environ, fits, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    plan, runtime = {"dp_shard": ranks}, {"cpus_per_rank": cpus_per_rank}
    message = (
        rf"parallel must ask for at most as many ranks as the 2 CPU cores .* with {cpus_per_rank}"
        rf" for each, but it is {ranks}: .*\(--runtime.oversubscribe\)"
    )
    with nullcontext() if fits else pytest.raises(ValueError, match=message):
        Devices.of(config(plan=plan, runtime=runtime), environ, num_gpus=0)
    asked = config(plan=plan, runtime={**runtime, "oversubscribe": True})
    assert Devices.of(asked, environ, num_gpus=0).plan.num_ranks == ranks


CPU, ELSEWHERE = {"trainer": nemorl.TrainerConfig(device="cpu")}, {"RAY_ADDRESS": "elsewhere:6379"}


@pytest.mark.parametrize(
    ("options", "environ", "gpus", "cluster", "precision"),
    [
        ({}, {}, 0, False, "float32"),
        ({}, {}, 1, False, "bfloat16"),
        (CPU, {}, 1, False, "float32"),
        ({"plan": {"param_dtype": "bfloat16"}}, {}, 0, False, "bfloat16"),
        ({"plan": {"tp": 2}}, ELSEWHERE, 0, True, "bfloat16"),
        ({"plan": {"tp": 2}}, ELSEWHERE, 0, False, "float32"),
        ({}, TORCHRUN, 2, False, "bfloat16"),
    ],
)
def test_the_precision_follows_from_the_devices(
    options, environ, gpus, cluster, precision, monkeypatch
):
    """A cluster is asked where its ranks train and this machine has no GPU."""
    monkeypatch.setattr(devices, "_cluster_has_gpus", lambda address: cluster)
    found = Devices.of(config(**options), environ, num_gpus=gpus)
    assert found.plan.param_dtype == found.config.parallel.param_dtype == precision


def test_a_cluster_is_asked_for_its_gpus(monkeypatch):
    ray_cpus()
    monkeypatch.undo()
    monkeypatch.setitem(cluster._STATE, "local", False)
    assert devices._cluster_has_gpus("auto") == (NUM_GPUS > 0)
    monkeypatch.setattr("ray.cluster_resources", dict)
    assert not devices._cluster_has_gpus("auto")

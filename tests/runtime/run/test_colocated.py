"""Engines on the GPUs of ranks that Ray places, on a cluster at RAY_ADDRESS."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nemorl
from nemorl import GenerationConfig
from nemorl.runtime.engines.replicas import engine_bundles, rank_shares
from nemorl.runtime.run import parts
from nemorl.runtime.run.launch import Launch
from nemorl.runtime.workers.cluster import DRIVER, Bundle
from tests.runtime.workers.nodes import printed

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_engines_share_the_gpus_of_ranks_that_ray_places(tmp_path: Path):
    """By a whole run: all learn and sample the same numbers."""
    seen = printed("tests.runtime.run.colocated", tmp_path, timeout=400)
    node = seen["ranks"][0][0]
    assert seen["ranks"] == seen["engines"] == [[node, "0"], [node, "1"]]
    assert all(line["token_mult_prob_error"] < 1 + 1e-4 for line in seen["history"])
    assert len({line["entropy"] for line in seen["history"]}) == 2
    assert "at most 2 where replicas of 1 GPUs share those of 2 ranks" in seen["refused"]
    assert seen["smallest"] == [None, 5, 7, None]
    assert any("or of the GPUs are not known" in each for each in seen["warned"])


TWO = GenerationConfig(backend="vllm", num_replicas=2, tensor_parallel_size=2, cpus_per_replica=3)


@pytest.mark.parametrize("name", ["", "critic"])
def test_engines_meet_the_ranks_of_the_policy_alone(name: str, monkeypatch, tmp_path: Path):
    seen: list[Any] = []
    monkeypatch.setattr(parts, "make_trainer", lambda *given: seen.extend(given))
    config, plan = nemorl.GRPOConfig(generation=TWO), nemorl.ParallelPlan(tp=2)
    devices, directory = SimpleNamespace(ranked=True, plan=plan), SimpleNamespace(path=tmp_path)
    launch = object.__new__(Launch)
    vars(launch).update(config=config, devices=devices, directory=directory)
    parts.ranks_of(launch, name)
    assert seen[-1] == (None if name else TWO)


def test_each_replica_has_gpus_of_one_node():
    assert rank_shares("aaabb", TWO) == [[0, 1], [3, 4]]
    assert rank_shares("aaaab", TWO) == [[0, 1], [2, 3]]
    bundles = engine_bundles(TWO, cuda=True, nodes=[*"aaabb"])
    assert bundles == {"generation": [Bundle(cpus=3, node="a"), Bundle(cpus=3, node="b")]}
    alone = engine_bundles(replace(TWO, trainer_gpus=1), cuda=True)["generation"]
    assert alone == [Bundle(cpus=3, gpus=2, node=DRIVER), Bundle(cpus=3, gpus=2)]
    elsewhere = engine_bundles(replace(TWO, trainer_gpus=0), cuda=True)["generation"]
    assert elsewhere == [Bundle(cpus=3, gpus=2)] * 2
    message = "must be at most 1 where replicas of 2 GPUs share those of 4 ranks on 3 nodes"
    with pytest.raises(ValueError, match=message):
        rank_shares("abbc", TWO)

"""Replicas that die, hang, do not start or are interrupted, at every point: what is generated is
what it would have been, or an error says why.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import warnings

import psutil
import pytest
import ray
import torch

from nemorl.rollout.generation import WeightSource
from tests.ray_session import ray_cpus
from tests.runtime.cluster.processes import soon_gone
from tests.runtime.engines.toys import (
    MODEL,
    Toys,
    after,
    eventually,
    process,
    requests,
    toys,
)

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two replicas that the tests here use one after the other."""
    ray_cpus()
    with toys(tmp_path_factory.mktemp("pair"), timeout_s=10.0) as made:
        yield made


@pytest.fixture
def whole(pair) -> Toys:
    """Both up, and nothing to go wrong."""
    pair.repair()
    pair.wait_until_all_are_up()
    pair.update(1.0, version=1)
    pair.replicas.metrics()
    return pair


def restarts(made: Toys) -> list[int]:
    measured = made.replicas.metrics()
    return [
        int(measured[f"replica_{rank}/restarts"])
        for rank in range(made.replicas.config.num_replicas)
    ]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("die", r"replica-0 \(process \d+ on .*\) died"),
        pytest.param(
            *("stop", r"\(process \d+ on .*replica-0.log\) made no progress for 10 s"),
            marks=pytest.mark.slow,
        ),
        pytest.param("hang", r"replica-0 .* made no progress for 10 s", marks=pytest.mark.slow),
        pytest.param("CUDA error", r"CUDA error", marks=pytest.mark.slow),
    ],
)
def test_what_a_lost_replica_had_to_do_is_done_by_the_other(whole, harm, message):
    expected = whole.replicas.generate(requests(40))
    lost = process(whole.replicas, 0)
    whole.fault_at_work(0, harm)
    with pytest.warns(UserWarning, match=f"replica 0 is started again: .*{message}"):
        assert whole.replicas.generate(requests(40)) == expected
    assert restarts(whole) == [1, 0]
    assert eventually(lambda: not psutil.pid_exists(lost))


@pytest.mark.slow
def test_warnings_that_are_errors_do_not_stop_a_replica_from_coming_back(whole):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = whole.replicas.generate(requests(20))
        for rank in (0, 1):  # what comes next is by the one that was away
            whole.fault_at_work(rank)
            assert whole.replicas.generate(requests(20)) == expected


@pytest.mark.slow
def test_one_that_dies_while_it_takes_weights(whole):
    whole.fault("begin", 0)
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        whole.update(3.0, version=3)
    assert whole.happened("begin", 0)
    whole.repair()
    expected = whole.replicas.generate(requests(10))
    whole.wait_until_all_are_up()
    whole.fault_at_work(1)
    with pytest.warns(UserWarning, match="replica 1"):
        assert whole.replicas.generate(requests(10)) == expected


@pytest.mark.slow
def test_interrupted_it_drops_everything_and_can_go_on(whole):
    expected = whole.replicas.generate(requests(10))
    endless = requests(10, max_new_tokens=10**6, seed=7)  # minutes, in a toy
    with pytest.raises(KeyboardInterrupt), after(0.2, os.kill, os.getpid(), signal.SIGINT):
        whole.replicas.generate(endless)
    actors = [one.actor for one in whole.replicas.running()]
    assert eventually(lambda: ray.get([one.call.remote("unfinished") for one in actors]) == [0, 0])
    assert whole.replicas.generate(requests(10)) == expected


@pytest.mark.slow
def test_it_gives_up_where_a_replica_dies_again_and_again(tmp_path):
    ray_cpus()
    with toys(tmp_path, step_s=(0.005,), max_restarts=1) as one:
        one.fault("step", 0)
        with (
            pytest.warns(UserWarning, match="replica 0 is started again: .* died"),
            pytest.raises(
                ChildProcessError,
                match=(
                    r"(?s)replica 0 has ended 2 times in a row without finishing a prompt"
                    r" \(generation.max_restarts is 1\).*last words in step"
                ),
            ),
        ):
            one.replicas.generate(requests(4))


@pytest.mark.slow
def test_a_stage_that_ends_ends_its_engine_which_starts_again(tmp_path):
    ray_cpus()
    with toys(tmp_path, step_s=(0.02,), pipeline_parallel_size=2) as made:
        expected = made.replicas.generate(requests(4))
        (before,) = made.replicas.running()
        assert len(before.stages) == 1
        assert eventually((tmp_path / "stage_is_up").exists)
        died = r"replica-0-stage-1 \(log .*replica-0-stage-1.log\) died: one of its workers ended"
        with pytest.warns(UserWarning, match=died):
            (tmp_path / "stage-1").touch()
            assert eventually(lambda: before not in made.replicas.running())
        made.repair()
        made.wait_until_all_are_up()
        assert made.replicas.generate(requests(4)) == expected
        (now,) = made.replicas.running()
        assert not set(now.stages) & set(before.stages)


@pytest.mark.slow
def test_a_stage_that_does_not_start_says_why(tmp_path):
    ray_cpus()
    (tmp_path / "stage-1").write_text("start")
    (tmp_path / "start-0").write_text("1000")
    with (
        pytest.raises(ValueError, match="the stage can't start"),
        toys(tmp_path, step_s=(0.02,), pipeline_parallel_size=2),
    ):
        pass


@pytest.mark.slow
def test_an_engine_that_does_not_start_says_why_first(tmp_path):
    ray_cpus()
    (tmp_path / "start-1").write_text("not enough memory for the cache")
    with pytest.raises(ValueError, match=r"^not enough memory for the cache"):
        Toys(tmp_path)


@contextlib.contextmanager
def driver(forked, folder):
    """A process that generates, all the processes that it has brought about, and the two of them
    that are its replicas.
    """
    command = [forked / "python", "-m", "tests.runtime.engines.toys", str(folder)]
    driving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = driving.stdout.readline()
        assert line, driving.stderr.read()
        program, *replicas = [psutil.Process(pid) for pid in json.loads(line)]
        family = [
            *program.children(recursive=True),
            *(child for one in replicas for child in one.children(recursive=True)),
        ]
        assert set(replicas) <= set(family)
        time.sleep(0.5)  # until it generates
        yield driving, family
    finally:
        driving.kill()
        driving.communicate()


@pytest.mark.slow
def test_nothing_is_left_when_the_driver_is_killed(forked, tmp_path):
    with driver(forked, tmp_path) as (driving, family):
        driving.kill()
        driving.wait()
        assert soon_gone(*(one.pid for one in family))


@pytest.mark.slow
def test_the_loss_of_the_cluster_is_an_error_in_bounded_time(forked, tmp_path):
    with driver(forked, tmp_path) as (driving, family):
        next(one for one in family if "gcs_server" in one.name()).kill()
        _, errors = driving.communicate(timeout=300)
        assert driving.returncode == 1
        assert (
            "ClusterLost: the Ray cluster is lost: the cluster's head"
            in errors.strip().splitlines()[-1]
        )
        assert soon_gone(*(one.pid for one in family))


def sampled(made: Toys, asked, begin=lambda: None):
    """The answers to requests that come from an event loop, or their errors."""

    async def main():
        tasks = [asyncio.ensure_future(made.replicas.sample(*one)) for one in asked]
        await asyncio.sleep(0.1)
        begin()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


class Stepping(WeightSource):
    """A trainer that may have gone on since the last update; all of its weights are its version."""

    version = 1

    def newest(self):
        weights = ((name, torch.full_like(p, self.version)) for name, p in MODEL.named_parameters())
        return self.version, weights


@pytest.mark.slow
def test_a_replica_that_comes_back_has_the_newest_weights_that_there_are(whole):
    """After the trainer's next step, while the other has those of the last update; where all come
    back, too. Each answer says which it has.
    """
    source, asked = Stepping(), requests(40)
    answers = {}
    for version in (1, 2):
        source.version = version
        assert whole.replicas.update_weights(source) == version
        answers[version] = whole.replicas.generate(asked)
    source.version = 1
    whole.replicas.update_weights(source)
    source.version = 2
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        found = sampled(whole, asked, lambda: whole.kill(0))
    whole.wait_until_all_are_up()
    for answer in (found, whole.replicas.generate(asked)):
        for one, *either in zip(answer, answers[1], answers[2], strict=True):
            version = one[0].policy_versions[0]
            assert one == either[version - 1]
    assert {replica.version for replica in whole.replicas._router.state.replicas} == {1, 2}

    def kill_both():
        whole.kill(0)
        whole.kill(1)

    source.version = 3
    with pytest.warns(UserWarning, match="is started again"):
        found = sampled(whole, asked, kill_both)
    assert 3 in {one[0].policy_versions[0] for one in found}
    assert whole.replicas.update_weights(source) == 3

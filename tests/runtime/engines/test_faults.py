"""Replicas that die, hang, do not start or are interrupted, at every point: what is generated is
what it would have been, or an error says why.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
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
    alive,
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


def test_a_replica_gets_what_it_can_decode_at_a_time(whole):
    """And one prompt begins as long as there is room for one of its samples."""
    whole.replicas.generate(requests(40, n=3))
    peaks = ray.get([one.actor.call.remote("most") for one in whole.replicas.running()])
    assert all(8 <= peak <= 8 + 2 for peak in peaks)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("die", r"replica-0 \(process \d+ on .*\) died"),
        ("stop", r"\(process \d+ on .*replica-0.log\) made no progress for 10 s"),
        pytest.param("hang", r"replica-0 .* made no progress for 10 s", marks=pytest.mark.slow),
        ("CUDA error", r"CUDA error"),
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


def test_warnings_that_are_errors_do_not_stop_a_replica_from_coming_back(whole):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = whole.replicas.generate(requests(20))
        for rank in (0, 1):  # what comes next is by the one that was away
            whole.fault_at_work(rank)
            assert whole.replicas.generate(requests(20)) == expected


def test_it_comes_back_with_the_present_weights(whole):
    """The other one is killed next, so that all there is comes from the one that was away."""
    expected = whole.replicas.generate(requests(20))
    whole.update(2.0, version=2)
    whole.fault_at_work(0)
    with pytest.warns(UserWarning, match="replica 0"):
        others = whole.replicas.generate(requests(20))
    assert others != expected
    whole.wait_until_all_are_up()
    whole.fault_at_work(1)
    with pytest.warns(UserWarning, match="replica 1 is started again"):
        assert whole.replicas.generate(requests(20)) == others


def test_one_that_dies_while_idle_is_found_out_when_it_is_used(whole):
    expected = whole.replicas.generate(requests(10))
    pid = process(whole.replicas, 1)
    whole.kill(1)
    assert eventually(lambda: not alive(pid))
    with pytest.warns(
        UserWarning, match=r"replica 1 is started again.*replica-1 \(process \d+ on .*\) died"
    ):
        assert whole.replicas.generate(requests(10)) == expected


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
def test_one_that_dies_while_it_starts_again_is_started_once_more(whole):
    expected = whole.replicas.generate(requests(30))
    whole.fault("start", 0)
    with pytest.warns(UserWarning) as told:
        whole.fault_at_work(0)
        assert whole.replicas.generate(requests(30)) == expected
        assert eventually(lambda: whole.happened("start", 0))
        whole.repair()
        whole.wait_until_all_are_up()
    assert sum("replica 0 is started again" in str(warning.message) for warning in told) >= 2
    assert any("replica 0 is back after" in str(warning.message) for warning in told)


def test_interrupted_it_drops_everything_and_can_go_on(whole):
    expected = whole.replicas.generate(requests(10))
    endless = requests(10, max_new_tokens=10**6, seed=7)  # minutes, in a toy
    with pytest.raises(KeyboardInterrupt), after(0.2, os.kill, os.getpid(), signal.SIGINT):
        whole.replicas.generate(endless)
    actors = [one.actor for one in whole.replicas.running()]
    assert eventually(lambda: ray.get([one.call.remote("unfinished") for one in actors]) == [0, 0])
    assert whole.replicas.generate(requests(10)) == expected


@pytest.mark.slow
def test_an_error_of_one_while_it_takes_weights(whole):
    """Only wrong weights end an update: any other error of an engine starts it again."""
    whole.fault("begin", 0, "out of memory")
    with pytest.warns(UserWarning, match="replica 0 is started again: .*out of memory"):
        whole.update(4.0, version=4)
    whole.repair()
    expected = whole.replicas.generate(requests(10))
    whole.wait_until_all_are_up()
    assert whole.replicas.generate(requests(10)) == expected


@pytest.mark.slow
def test_the_others_go_on_without_one_that_dies_again_and_again(tmp_path):
    ray_cpus()
    with toys(tmp_path, max_restarts=1) as pair:
        pair.update(1.0)
        expected = pair.replicas.generate(requests(40))
        pair.fault("step", 0)
        with pytest.warns(
            UserWarning, match=r"the run goes on without it: replica 0 has ended 2 times in a row"
        ):
            for _ in range(200):
                assert pair.replicas.generate(requests(40)) == expected
                if pair.replicas._router.state.replicas[0].status == "given up":
                    break
        pair.update(2.0)
        assert pair.replicas.generate(requests(40)) != expected
        assert [one.id.rank for one in pair.replicas.running()] == [1]


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
def test_where_the_only_one_dies_it_is_waited_for(tmp_path):
    ray_cpus()
    with toys(tmp_path, step_s=(0.005,)) as one:
        expected = one.replicas.generate(requests(10))
        one.fault_at_work(0)
        with pytest.warns(UserWarning) as told:
            assert one.replicas.generate(requests(10)) == expected
    messages = [str(warning.message) for warning in told]
    assert any("replica 0 is started again: " in message for message in messages)
    assert any("replica 0 is back after" in message for message in messages)


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


def test_a_stage_that_does_not_start_says_why(tmp_path):
    ray_cpus()
    (tmp_path / "stage-1").write_text("start")
    (tmp_path / "start-0").write_text("1000")
    with (
        pytest.raises(ValueError, match="the stage can't start"),
        toys(tmp_path, step_s=(0.02,), pipeline_parallel_size=2),
    ):
        pass


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


@pytest.mark.slow
def test_twenty_kills_at_random_times(tmp_path):
    """Of replicas that work, start, or take weights, often all at once."""
    ray_cpus()
    with toys(tmp_path, max_restarts=100) as pair:
        batches = [requests(24, max_new_tokens=40, seed=100 * i) for i in range(4)]
        expected = [
            (pair.update(i, i), pair.replicas.generate(batch))[1] for i, batch in enumerate(batches)
        ]
        draw = random.Random(0)

        def kill(kills: int = 0) -> None:
            while kills < 20:
                time.sleep(draw.uniform(0.1, 3.0))
                kills += pair.kill(draw.randrange(2))

        killer, rounds = threading.Thread(target=kill), 0
        killer.start()
        with pytest.warns(UserWarning, match="is started again"):
            while killer.is_alive() or rounds % 4:
                pair.update(rounds % 4, rounds % 4)
                assert pair.replicas.generate(batches[rounds % 4]) == expected[rounds % 4]
                rounds += 1


def sampled(made: Toys, asked, begin=lambda: None):
    """The answers to requests that come from an event loop, or their errors."""

    async def main():
        tasks = [asyncio.ensure_future(made.replicas.sample(*one)) for one in asked]
        await asyncio.sleep(0.1)
        begin()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


def test_requests_of_an_event_loop_outlive_a_replica(whole):
    expected = whole.replicas.generate(requests(60))
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        assert sampled(whole, requests(60), lambda: whole.kill(0)) == expected


def test_requests_of_an_event_loop_have_a_replica_that_came_back(whole):
    """Both die, so that all wait for a new one, which gets the present weights."""
    whole.update(2.0, version=2)
    expected = whole.replicas.generate(requests(40))

    def kill_both():
        whole.kill(0)
        whole.kill(1)

    with pytest.warns(UserWarning, match="is started again"):
        assert sampled(whole, requests(40), kill_both) == expected


def test_requests_in_flight_when_a_replica_takes_weights_and_dies(whole):
    """Each is answered whole: by the old weights, the new, or first one and then the other."""
    asked = requests(40, max_new_tokens=60)
    old = whole.replicas.generate(asked)
    whole.update(2.0, version=2)
    new = whole.replicas.generate(asked)
    whole.update(1.0, version=1)
    whole.fault("begin", 0)
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        found = sampled(whole, asked, lambda: whole.update(2.0, version=2))
    assert whole.happened("begin", 0)
    tokens = [[[sample.token_ids for sample in one] for one in some] for some in (found, old, new)]
    assert all(one in pair for one, *pair in zip(*tokens, strict=True))
    assert new != found != old


class Stepping(WeightSource):
    """A trainer that may have gone on since the last update; all of its weights are its version."""

    version = 1

    def newest(self):
        weights = ((name, torch.full_like(p, self.version)) for name, p in MODEL.named_parameters())
        return self.version, weights


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


def test_the_requests_of_an_event_loop_fail_where_no_replica_is_left(tmp_path):
    ray_cpus()
    with toys(tmp_path, step_s=(0.005,), max_restarts=0) as one:
        found = sampled(one, requests(10, max_new_tokens=500), lambda: one.kill(0))
        failed = [each for each in found if isinstance(each, Exception)]
        assert failed and all("replica 0 has ended 1 times" in str(each) for each in failed)

"""Replicas that die, hang or are interrupted: what is generated is what it would have been."""

import asyncio
import os
import signal
import threading

import pytest
import ray
import torch

from nemorl.rollout.generation import WeightSource
from tests.ray_session import ray_cpus
from tests.runtime.engines.toys import MODEL, Toys, process, requests, toys
from tests.runtime.workers.processes import eventually, soon_gone

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two replicas for all tests here."""
    ray_cpus()
    with toys(tmp_path_factory.mktemp("pair"), timeout_s=10.0) as made:
        yield made


@pytest.fixture
def whole(pair) -> Toys:
    """Both up, without faults."""
    pair.repair()
    pair.wait_until_all_are_up()
    pair.update(1.0, version=1)
    pair.replicas.metrics()
    return pair


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("die", r"replica-0 \(process \d+ on .*\) died"),
        pytest.param(
            *("stop", r"\(process \d+ on .*replica-0.log\) made no progress for 10 s"),
            marks=pytest.mark.slow,
        ),
        pytest.param("CUDA error", r"CUDA error", marks=pytest.mark.slow),
    ],
)
def test_what_a_lost_replica_had_to_do_is_done_by_the_other(whole, harm, message):
    expected = whole.replicas.generate(requests(40))
    lost = process(whole.replicas, 0)
    whole.fault("step", 0, harm)  # in its next step
    with pytest.warns(UserWarning, match=f"replica 0 is started again: .*{message}"):
        assert whole.replicas.generate(requests(40)) == expected
    measured = whole.replicas.metrics()
    assert [measured[f"replica_{rank}/restarts"] for rank in (0, 1)] == [1, 0]
    assert soon_gone(lost)


@pytest.mark.slow
def test_interrupted_it_drops_everything_and_can_go_on(whole):
    expected = whole.replicas.generate(requests(10))
    interrupt = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):  # it would take minutes
        whole.replicas.generate(requests(10, max_new_tokens=10**6))
    interrupt.join()
    actors = [one.actor for one in whole.replicas.running()]
    assert eventually(lambda: ray.get([one.call.remote("unfinished") for one in actors]) == [0, 0])
    assert whole.replicas.generate(requests(10)) == expected


def sampled(made: Toys, asked, begin=lambda: None):
    """The answers to requests that come from an event loop, or their errors."""

    async def answer(one):
        return (await made.replicas.answers([one]))[0]

    async def main():
        tasks = [asyncio.ensure_future(answer(one)) for one in asked]
        await asyncio.sleep(0.1)
        begin()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


class Stepping(WeightSource):
    """A trainer that goes on; all of its weights are its version."""

    version = 1

    def newest(self):
        weights = ((name, torch.full_like(p, self.version)) for name, p in MODEL.named_parameters())
        return self.version, weights


@pytest.mark.slow
def test_a_replica_that_comes_back_has_the_newest_weights_that_there_are(whole):
    """Those of the trainer's next step, which the other lacks; each answer says which."""
    source, asked = Stepping(), requests(40)
    answers = {}
    for version in (1, 2):
        source.version = version
        assert whole.replicas.supply.update(source) == version
        answers[version] = whole.replicas.generate(asked)
    source.version = 1
    whole.replicas.supply.update(source)
    source.version = 2
    with pytest.warns(UserWarning, match="replica 0 is started again"):
        found = sampled(whole, asked, lambda: whole.kill(0))
    whole.wait_until_all_are_up()
    for answer in (found, whole.replicas.generate(asked)):
        for one, *either in zip(answer, answers[1], answers[2], strict=True):
            version = one[0].policy_versions[0]
            assert one == either[version - 1]
    assert {replica.version for replica in whole.replicas._router.state.replicas} == {1, 2}

    source.version = 3
    with pytest.warns(UserWarning, match="is started again"):
        found = sampled(whole, asked, lambda: [whole.kill(rank) for rank in (0, 1)])
    assert 3 in {one[0].policy_versions[0] for one in found}
    assert whole.replicas.supply.update(source) == 3

"""Groups of workers on the session's cluster."""

from pathlib import Path

import pytest
import ray

from nemorl.runtime.store.files import WorkerDied, WorkerTimeout
from tests.runtime.workers.processes import alive, soon_gone

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def group(workers):
    return workers(2, args=(10,), env={"MINE": "yes"})


def test_workers_know_their_ranks_and_answer_in_order(group):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MINE")
    assert [tuple(found.values()) for found in group.run_all("environment", *names)] == [
        (str(rank), "2", str(rank), "2", "127.0.0.1", "yes") for rank in range(2)
    ]
    assert group.run_all("all_reduce", timeout_s=60) == [3.0, 3.0]
    assert group.run_all("add", 1, 2) == [13, 13]
    assert ray.get(group.call(1, "add", 1)) == 11
    waiting = group.call(0, "wait", background=True)
    group.call(0, "meet")
    assert ray.get(waiting), "other calls go on meanwhile"


@pytest.mark.slow
def test_all_output_goes_into_the_log(group, tmp_path: Path):
    group.run_all("write")
    text = (tmp_path / "logs" / "worker-1.log").read_text()
    assert text.startswith(f"--- worker 1, process {group.info(1).pid} on ")
    for line in ("from Python", "an error from Python", "from a descriptor", "from C", "a child"):
        assert line in text


@pytest.mark.slow
def test_errors_deaths_and_time_limits(group, tmp_path: Path):
    with pytest.raises(ValueError, match="no good"):
        group.run_all("fail", "no good")
    with pytest.raises(
        WorkerTimeout, match=r"no answer to sleep within 0.5 s from worker 0 \(process"
    ):
        group.run_all("sleep", 3, timeout_s=0.5)
    with pytest.raises(WorkerDied, match=r"died in run_out: Ray killed it, because memory"):
        group.run_all("run_out")
    child = ray.get(group.call(1, "spawn"))
    group.call(1, "write")
    with pytest.raises(WorkerDied) as caught:
        while True:
            group.gather({1: group.call(1, "die")}, 10, "a test")
    text = str(caught.value)
    assert text.startswith(f"worker 1 (process {group.info(1).pid} on ")
    assert "died in a test: it was killed" in text and text.endswith("| from a child")
    assert soon_gone(child)
    pid = group.info(0).pid
    group.shutdown()
    assert not alive(pid)

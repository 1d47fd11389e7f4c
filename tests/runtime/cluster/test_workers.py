"""Worker groups with real Ray: rendezvous, calls, errors, deaths, restarts, logs, and nothing left
at the end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nemorl.runtime.cluster import connection as ray_connection
from nemorl.runtime.cluster.placement import ClusterLost, RayClusterError
from nemorl.runtime.cluster.workers import (
    RayWorkerGroup,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    wait,
)
from tests.runtime.cluster.processes import alive, soon_gone

pytestmark = pytest.mark.xdist_group("ray")


def test_workers_know_their_place_and_meet_through_gloo(workers):
    group: RayWorkerGroup = workers(
        2, env={"SAME": "s"}, env_per_worker=[{"OTHER": "a"}, {"OTHER": "b"}]
    )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SAME", "OTHER")
    assert [list(found.values()) for found in group.run_all("environment", *names)] == [
        ["0", "0", "2", "127.0.0.1", "s", "a"],
        ["1", "1", "2", "127.0.0.1", "s", "b"],
    ]
    assert group.run_all("all_reduce", timeout_s=60) == [3.0, 3.0]
    assert len(group) == 2 and len({group.info(rank).pid for rank in range(2)} | {os.getpid()}) == 3


def test_calls(workers):
    """All, one, sharded with results in order of rank, and large arrays."""
    group: RayWorkerGroup = workers(3, args=(100,))
    assert group.run_all("add", 1, 2) == [103] * 3 and group.run_rank_zero("add", 5) == 105
    assert group.run_sharded("add", [(1,), (2, 3), ()]) == [101, 105, 100]
    large = np.arange(2_000_000.0)
    np.testing.assert_array_equal(group.call(1, "add", large).result(), 100 + large)
    with pytest.raises(ValueError, match="one tuple of arguments for each of 3 workers"):
        group.run_sharded("add", [(1,)])


def test_results_come_in_the_order_of_ranks_whoever_is_first(workers):
    group: RayWorkerGroup = workers(2)
    assert group.run_sharded("sleep", [(0.5,), (0.0,)]) == [0.5, 0.0]
    slow, fast = group.call(0, "sleep", 1.5), group.call(1, "sleep", 0.1)
    assert wait([slow, fast], 10) == ([fast], [slow])
    assert fast.done() and not slow.done() and wait([slow], 0) == ([], [slow])
    assert slow.result() == 1.5 and wait([], 1) == ([], [])


def test_calls_from_several_threads_run_side_by_side(workers):
    group: RayWorkerGroup = workers(1, max_concurrency=4)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(group.run_rank_zero("meet")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3], "each waited for all"


@pytest.mark.parametrize(
    ("kind", "raised", "told"),
    [
        ("FloatingPointError", FloatingPointError, "nan"),
        ("ValueError", ValueError, "nan"),
        ("Subtle", FloatingPointError, "nan"),
        ("Own", WorkerError, "Own: nan"),
        ("Unsendable", WorkerError, "Unsendable: nan"),
        ("SystemExit", WorkerError, "SystemExit: nan"),
    ],
)
def test_what_a_method_raises_is_raised_here_message_first(
    group_of_one, kind: str, raised: type[Exception], told: str
):
    with pytest.raises(raised) as caught:
        group_of_one.run_rank_zero("fail", kind, "nan")
    assert str(caught.value) == told and type(caught.value) is raised
    assert any(
        "targets.py" in note and "ray" not in note.lower() for note in caught.value.__notes__
    )
    assert group_of_one.run_rank_zero("add", 1) == 1, "the worker lives on"


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory):
    from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster
    from tests.ray_session import ray_cpus
    from tests.runtime.cluster.conftest import TARGET

    ray_cpus()
    with RayVirtualCluster({"one": [Bundle()]}) as cluster:
        yield RayWorkerGroup(
            cluster.placement("one"), TARGET, log_dir=tmp_path_factory.mktemp("logs"), name="single"
        )


def test_what_cannot_be_sent_is_told(group_of_one):
    with pytest.raises(WorkerError, match=r"lock: .*pickle"):
        group_of_one.run_rank_zero("lock")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        group_of_one.run_rank_zero("nothing")


def test_a_worker_that_does_not_answer_is_named(group_of_one):
    with pytest.raises(
        WorkerTimeout,
        match=(
            rf"no answer to sleep within 0.2 s from single-0 \(process {group_of_one.info(0).pid}"
            r" on .*single-0.log"
        ),
    ):
        group_of_one.call(0, "sleep", 1).result(0.2)
    with pytest.raises(WorkerTimeout, match=r"no answer to sleep within 0\.1 s"):
        group_of_one.run_all("sleep", 1, timeout_s=0.1)


def test_all_output_goes_into_the_workers_log(workers, tmp_path: Path, capfd):
    group: RayWorkerGroup = workers(2, name="voice")
    group.call(1, "write").result()
    lines = (tmp_path / "logs" / "voice-1.log").read_text(encoding="utf-8").splitlines()
    assert sorted(lines[1:]) == sorted(
        ["from Python", "an error from Python", "from a descriptor", "from C", "from a child"]
    )
    assert (
        lines[0].startswith(f"--- voice-1, incarnation 0, process {group.info(1).pid} on ")
        and group.info(1).log == tmp_path / "logs" / "voice-1.log"
    )
    assert capfd.readouterr() == ("", "")


def test_a_killed_worker_is_told_and_comes_back(workers, capfd):
    group: RayWorkerGroup = workers(2, args=(7,), name="fragile", max_concurrency=2)
    group.call(1, "write").result()
    before = [group.info(rank) for rank in range(2)]
    with pytest.raises(
        WorkerDied,
        match=(
            rf"^fragile-1 \(process {before[1].pid} on .*\) died: it was killed .*fragile-1.log and"
            r" ends:"
        ),
    ) as caught:
        group.run_sharded(
            "sleep_or_die", [(20,), (None,)]
        )  # the first error comes out, while rank 0 still sleeps
    assert str(caught.value).endswith("\n  | from a child")
    assert (caught.value.rank, caught.value.pid) == (1, before[1].pid)
    group.restart(1)
    assert (
        group.info(0) == before[0]
        and group.info(1).incarnation == 1
        and group.info(1).pid != before[1].pid
    )
    assert group.call(1, "add", 1).result() == 8 and group.run_rank_zero("environment", "RANK") == {
        "RANK": "0"
    }
    assert group.call(1, "environment", "RANK", "WORLD_SIZE").result() == {
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    assert capfd.readouterr() == ("", ""), "Ray has nothing to say to the user"


def test_a_worker_that_stands_still_can_be_killed_and_restarted(workers):
    group: RayWorkerGroup = workers(1)
    pending, pid = group.call(0, "stop_still"), group.info(0).pid
    assert wait([pending], 0.5) == ([], [pending])
    start = time.monotonic()
    group.restart(0)
    assert time.monotonic() - start < 20 and not alive(pid) and group.run_all("add", 2) == [2]
    with pytest.raises(WorkerDied, match="it was ended by us"):
        pending.result()


@pytest.mark.parametrize("end", ["killed from outside", "kill", "shutdown"])
def test_no_child_of_a_worker_outlives_it(workers, end: str):
    group: RayWorkerGroup = workers(1)
    children, pid = group.run_rank_zero("spawn"), group.info(0).pid
    assert alive(pid, *children) == [pid, *children]
    if end == "killed from outside":
        os.kill(pid, signal.SIGKILL)
        assert soon_gone(pid, *children)
    else:
        getattr(group, end)(*([0] if end == "kill" else []))
        assert alive(pid, *children) == [], "gone when the call returns"


def test_shutdown_is_in_order_and_may_be_repeated(workers, tmp_path: Path):
    group: RayWorkerGroup = workers(2, kwargs={"left": str(tmp_path / "left")})
    pids = [group.info(rank).pid for rank in range(2)]
    group.shutdown()
    assert [(tmp_path / f"left-{rank}").read_text(encoding="utf-8") for rank in range(2)] == [
        "in order"
    ] * 2 and not alive(*pids)
    group.shutdown()
    with pytest.raises(RayClusterError, match="have been shut down"):
        group.run_all("add", 1)


def test_shutdown_does_not_wait_for_a_worker_that_is_busy(workers):
    group: RayWorkerGroup = workers(1)
    group.call(0, "sleep", 60)
    start, pid = time.monotonic(), group.info(0).pid
    group.shutdown(timeout_s=0.5)
    assert time.monotonic() - start < 5 and not alive(pid)


SLOW = "tests.runtime.cluster.targets:Slow"


def slow_restarts(
    group: RayWorkerGroup, flag: Path
) -> tuple[list[threading.Thread], list[BaseException]]:
    """Both workers restarted at once; each takes a minute. What that raises."""
    flag.touch()
    raised: list[BaseException] = []

    def restart(rank: int) -> None:
        try:
            group.restart(rank)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=restart, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    return threads, raised


def test_restarts_do_not_wait_for_each_other_nor_shutdown_for_them(workers, tmp_path: Path):
    group: RayWorkerGroup = workers(2, SLOW, args=(str(tmp_path / "flag"),))
    threads, raised = slow_restarts(group, tmp_path / "flag")
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("flag-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(path.name.removeprefix("flag-")) for path in tmp_path.glob("flag-*")]
    assert len(pids) == 2 and not raised, "both are on their way"
    start = time.monotonic()
    group.shutdown()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - start < 8 and not alive(*pids)
    assert [type(error) for error in raised] == [
        RayClusterError
    ] * 2 and "have been shut down" in str(raised[0])


def test_a_process_that_has_got_the_id_of_a_dead_worker_is_left_alone(workers):
    group: RayWorkerGroup = workers(1)
    group.kill(0)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], process_group=0
    ) as stranger:
        group._workers[0].pid = stranger.pid  # as Linux may give it out again
        group.kill(0)
        group.restart(0)
        assert alive(stranger.pid) and group.run_all("add", 1) == [1]
        stranger.kill()


def test_a_probe_that_fails_once_is_not_the_end_of_the_cluster(
    workers, monkeypatch: pytest.MonkeyPatch
):
    group: RayWorkerGroup = workers(1)
    connection, probes = group.cluster.connection, iter(["no answer"])
    monkeypatch.setattr(
        connection,
        "_probe",
        lambda: next(probes, "") if threading.current_thread() is threading.main_thread() else "",
    )
    with pytest.raises(WorkerDied):
        group.run_rank_zero("sleep_or_die", None)
    assert list(probes) == []
    probes = iter(["no answer"] * 3)
    monkeypatch.setattr(ray_connection, "PROBE_PERIOD_S", 0.01)
    with pytest.raises(ClusterLost, match="no answer"):
        connection.look()
    connection.lost = ""


def test_a_target_that_cannot_be_made_leaves_no_process(workers, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"^engine.what must be something, but it is nothing: say what"
    ):
        workers(2, "tests.runtime.cluster.targets:Unmakeable")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tests\.nowhere'"):
        workers(1, "tests.nowhere:Target", name="lost")
    pids = [
        int(log.read_text("utf-8").split(", process ")[1].split()[0])
        for log in (tmp_path / "logs").glob("*.log")
    ]
    assert len(pids) == 3 and not alive(*pids)
    with pytest.raises(ValueError, match='target must be "module:Class", but it is'):
        workers(1, "Target")
    with pytest.raises(
        ValueError, match="env_per_worker must have one entry for each of 1 workers"
    ):
        workers(1, env_per_worker=[{}, {}])

"""A Ray that does not start: what it says, and where its folder may be. None is started."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemorl.runtime.workers import cluster
from nemorl.runtime.workers.cluster import LONGEST_PATH, ClusterLost, RayClusterError

LATE = "The current node timed out during startup. This could happen because"


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception | None]]:
    """What happens at each start of Ray; all are late from the last on."""
    happens: list[Exception | None] = []

    def initialize(address, variables, **given) -> None:
        error = happens.pop(0) if happens else Exception(LATE)
        if error is not None:
            raise error

    monkeypatch.setattr(cluster, "_initialize", initialize)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's have long names
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with ExitStack() as session:
            monkeypatch.setattr(cluster, "_SESSION", session)
            yield happens


def begin(timeout_s: float = 0) -> None:
    cluster._start_local(timeout_s, "runtime.start_timeout_s", num_cpus=1, num_gpus=None)


def test_a_start_that_fails_says_why(starts):
    reason = (
        rf"Ray cluster did not start within 0 s \({LATE[:9]}.*\): raise runtime\.start_timeout_s"
    )
    remedy = "make room in .* and /dev/shm, .* its logs are in .*nemorl-.{8}/r/session_latest/logs$"
    with pytest.raises(RayClusterError, match=f"{reason}, or {remedy}"):
        begin()


def test_a_late_start_is_tried_again_within_the_time(starts):
    starts[:] = [Exception(LATE), Exception(LATE), None]
    begin(timeout_s=1000)
    assert not starts


def test_ray_has_a_folder_of_this_user_in_which_its_sockets_have_room(
    tmp_path, starts, monkeypatch
):
    folder = cluster._private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    deep = tmp_path / ("x" * LONGEST_PATH)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    elsewhere = cluster._private_folder()
    elsewhere.rmdir()
    assert folder.parent != elsewhere.parent == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    with pytest.raises(RayClusterError, match=r"RAY_TMPDIR must be .* at most 2. bytes"):
        begin()


def test_a_look_after_the_end_starts_no_ray(monkeypatch):
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: pytest.fail("Ray is started"))
    with pytest.raises(ClusterLost, match="the connection to it has ended"):
        cluster.check()

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemorl.runtime.store.directory import LOCK_NAME, locked

HOLD = """
import os, sys, time
from nemorl.runtime.store.directory import locked
with locked(sys.argv[1]):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""
IN_USE = (
    r"run\.dir must be used by one run at a time, but .* is in use by {}: wait for it or name"
    r" another one \(--run\.dir\)"
)


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds tmp_path/run and has a forked child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, signal.SIGKILL)


def assert_in_use(folder: Path, by: str) -> None:
    with pytest.raises(ValueError, match=IN_USE.format(by)), locked(folder):
        pass


def test_a_folder_is_made_and_the_lock_leaves_no_trace(tmp_path: Path):
    with locked(tmp_path / "a" / "run"):
        assert str(os.getpid()) in (tmp_path / "a" / "run" / LOCK_NAME).read_text()
    assert list((tmp_path / "a" / "run").iterdir()) == []


def test_two_runs_of_one_process_cannot_have_it(tmp_path: Path):
    for _ in range(2):
        with locked(tmp_path):
            assert_in_use(tmp_path, f"process {os.getpid()} on .* since .*")


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path, holder):
    """Also where the process is killed and a child that it forked lives on."""
    assert_in_use(tmp_path / "run", f"process {holder.pid} on .* since .*")
    (tmp_path / "run" / LOCK_NAME).write_text("")
    assert_in_use(tmp_path / "run", "another process")
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK_NAME).exists()
    with locked(tmp_path / "run"):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / LOCK_NAME).symlink_to(other)
    with pytest.raises(ValueError, match=r"run\.dir must .*\.lock"), locked(tmp_path):
        pass
    assert other.read_text() == "mine"


def test_a_forked_child_leaves_the_lock_alone(tmp_path: Path):
    """Also one that leaves the block, as by an exception."""
    context = locked(tmp_path)
    context.__enter__()
    child = os.fork()
    if child == 0:
        context.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(child, 0)
    assert_in_use(tmp_path, f"process {os.getpid()} .*")
    context.__exit__(None, None, None)
    assert not (tmp_path / LOCK_NAME).exists()

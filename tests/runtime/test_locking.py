import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nemorl.runtime.locking import LOCK_NAME, Terminated, locked, sigterm_raises

HOLD = "import sys; from nemorl.runtime.locking import locked\nwith locked(sys.argv[1]):\n    print('held', flush=True); sys.stdin.read()"
IN_USE = r"run\.dir must be used by one run at a time, but .* is in use by {}: wait for it or name another one \(--run\.dir\)"


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_folder_is_made_and_the_lock_leaves_no_trace(tmp_path: Path):
    with locked(tmp_path / "a" / "run"):
        assert str(os.getpid()) in (tmp_path / "a" / "run" / LOCK_NAME).read_text()
    assert list((tmp_path / "a" / "run").iterdir()) == []


def test_two_runs_of_one_process_cannot_have_it(tmp_path: Path):
    for _ in range(2):
        with locked(tmp_path), pytest.raises(ValueError, match=IN_USE.format(f"process {os.getpid()} on .* since .*")), locked(tmp_path):
            pass


def test_another_process_is_named(tmp_path: Path, holder):
    with pytest.raises(ValueError, match=IN_USE.format(f"process {holder.pid} on .* since .*")), locked(tmp_path / "run"):
        pass
    (tmp_path / "run" / LOCK_NAME).write_text("?")
    with pytest.raises(ValueError, match=IN_USE.format("another process")), locked(tmp_path / "run"):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path, holder):
    """Also when it is killed; and a file left behind by whomever, with the number of a process that lives, is no lock."""
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK_NAME).exists()
    with locked(tmp_path / "run"):
        pass
    (tmp_path / "run" / LOCK_NAME).write_text(f'{{"pid": {os.getppid()}, "host": "elsewhere", "since": "1970"}}')
    with locked(tmp_path / "run"):
        pass


def test_an_error_frees_it(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir must be a folder that can be written to"), locked(tmp_path / "file" / "run"):
        pass


def test_sigterm_raises_once_and_the_old_way_comes_back():
    with pytest.raises(Terminated) as caught, sigterm_raises():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # while the checkpoint is written: no second one
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with sigterm_raises():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_another_thread_changes_nothing():
    found = []

    def work():
        with sigterm_raises():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]

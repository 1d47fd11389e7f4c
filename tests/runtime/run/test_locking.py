import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout
from nemorl.runtime.run.signals import (
    LOCK_NAME,
    SignalEar,
    Terminated,
    deferred,
    explain_sigterm,
    interruptible,
    locked,
    signal_came,
    signals_in_order,
)

HOLD = (
    "import sys; from nemorl.runtime.run.signals import locked\nwith locked(sys.argv[1]):\n   "
    " print('held', flush=True); sys.stdin.read()"
)
IN_USE = (
    r"run\.dir must be used by one run at a time, but .* is in use by {}: wait for it or name"
    r" another one \(--run\.dir\)"
)


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
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
        with (
            locked(tmp_path),
            pytest.raises(ValueError, match=IN_USE.format(f"process {os.getpid()} on .* since .*")),
            locked(tmp_path),
        ):
            pass


def test_another_process_is_named(tmp_path: Path, holder):
    with (
        pytest.raises(ValueError, match=IN_USE.format(f"process {holder.pid} on .* since .*")),
        locked(tmp_path / "run"),
    ):
        pass
    (tmp_path / "run" / LOCK_NAME).write_text("?")
    with (
        pytest.raises(ValueError, match=IN_USE.format("another process")),
        locked(tmp_path / "run"),
    ):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path, holder):
    """Also when it is killed; and a file left behind by whomever, with the number of a process that
    lives, is no lock.
    """
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK_NAME).exists()
    with locked(tmp_path / "run"):
        pass
    (tmp_path / "run" / LOCK_NAME).write_text(
        f'{{"pid": {os.getppid()}, "host": "elsewhere", "since": "1970"}}'
    )
    with locked(tmp_path / "run"):
        pass


def test_an_error_frees_it(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"run\.dir must be a folder that can be written to"),
        locked(tmp_path / "file" / "run"),
    ):
        pass


def test_signals_in_order_once_and_the_old_way_comes_back():
    with pytest.raises(Terminated) as caught, signals_in_order():
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
        with signals_in_order():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_another_thread_changes_nothing():
    found = []

    def work():
        with signals_in_order():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_waits_for_the_end_of_a_block(number, error, capfd):
    done = []
    with pytest.raises(error), signals_in_order():
        with deferred(lambda: True):
            send(number)
            done.append("step")
        done.append("never")
    assert done == ["step"]
    assert (
        "the run ends once this step is finished; a second signal (Ctrl-C) ends it at once"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(("number", "waits"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_until_an_update_has_begun_sigterm_does_not_wait(number, waits):
    done = []
    with (
        pytest.raises((Terminated, KeyboardInterrupt)),
        signals_in_order(),
        deferred(lambda: False),
    ):
        send(number)
        done.append("rest of the step")
    assert bool(done) is waits


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [("SIGINT", "SIGINT", KeyboardInterrupt), ("SIGINT", "SIGTERM", Terminated)],
)
def test_a_second_signal_raises_at_once(first, second, error):
    done = []
    with pytest.raises(error), signals_in_order(), deferred(lambda: True):
        send(signal.Signals[first])
        done.append("a while")
        send(signal.Signals[second])
        done.append("never")
    assert done == ["a while"]


def test_an_interruptible_part_of_a_block_is_left_at_once_and_the_rest_is_done():
    done = []
    with pytest.raises(Terminated), signals_in_order(), deferred(lambda: True):
        send(signal.SIGTERM)
        try:
            with interruptible():
                done.append("never")
        finally:
            done.append("record")
    with pytest.raises(KeyboardInterrupt), signals_in_order(), deferred(lambda: True):
        with interruptible():
            pass
        send(signal.SIGINT)
        done.append("rest")
    with pytest.raises(KeyboardInterrupt), signals_in_order(), interruptible():
        send(signal.SIGINT)
    assert done == ["record", "rest"]


def test_an_error_in_a_block_forgets_the_signal_that_waited():
    with signals_in_order():
        with pytest.raises(ZeroDivisionError), deferred(lambda: True):
            send(signal.SIGTERM)
            raise ZeroDivisionError
        with deferred(lambda: True):
            pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def end_a_forked_child() -> int:
    """Its exit status, when it has been sent SIGTERM."""
    child = os.fork()
    if child == 0:
        try:
            time.sleep(20)
        finally:
            os._exit(7)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_is_ended_by_its_first_signal():
    """Or Process.terminate() of a data loader's workers would be waited for in vain."""
    begun = time.monotonic()
    with signals_in_order(), deferred(lambda: True):
        status = end_a_forked_child()
    assert time.monotonic() - begun < 10 and os.WEXITSTATUS(status) == 7


LEAVES_A_CHILD = """
import os, signal, sys, time
from nemorl.runtime.run.signals import locked
with locked(sys.argv[1]):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_ends_with_its_process_though_a_forked_child_lives(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_CHILD, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        child = int(process.stdout.readline())
        process.wait()
        time.sleep(0.2)  # the child has come to life
        try:
            os.kill(child, 0)
            with locked(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_leaves_the_lock_alone(tmp_path: Path):
    """Also one that leaves the block, as by an exception."""
    context = locked(tmp_path)
    context.__enter__()
    child = os.fork()
    if child == 0:
        context.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK_NAME).exists()
    context.__exit__(None, None, None)
    assert not (tmp_path / LOCK_NAME).exists()


DEATH = WorkerDied("rank 1 died", rank=1, host="here", pid=7, reason="it was killed")


@pytest.mark.filterwarnings("ignore:rank 1 died")
@pytest.mark.parametrize("found", [DEATH, WorkerTimeout("rank 1 hung")])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_that_waits_for_ranks_that_are_gone_raises(number, error, found):
    """Else the run would begin anew with others (runtime.max_restarts), though it has been told to
    end.
    """
    with pytest.raises(error) as caught, signals_in_order(), deferred(lambda: True):
        send(number)
        raise found
    assert caught.value.__cause__ is found
    with pytest.raises(type(found)), signals_in_order(), deferred(lambda: True):
        raise found
    with pytest.raises(ZeroDivisionError), signals_in_order(), deferred(lambda: True):
        send(number)
        raise ZeroDivisionError


@pytest.mark.parametrize("begun", [True, False])
def test_sigterm_that_comes_of_a_death_tells_of_it_at_once(begun, capfd):
    found: list[Exception | None] = [DEATH]
    try:
        explain_sigterm(lambda: found[0])
        with pytest.raises(WorkerDied), signals_in_order(), deferred(lambda: begun):
            send(signal.SIGTERM)
            raise AssertionError
        assert capfd.readouterr().err == ""
        found[0] = None
        with pytest.raises(Terminated), signals_in_order(), deferred(lambda: begun):
            send(signal.SIGTERM)
    finally:
        explain_sigterm(None)


def test_it_is_known_that_a_signal_came():
    with pytest.raises(KeyboardInterrupt), signals_in_order():
        assert not signal_came()
        with deferred(lambda: True):
            send(signal.SIGINT)
            assert signal_came()
    assert not signal_came(), "that run is over"
    with signals_in_order():
        assert not signal_came()


def test_a_signal_is_heard_though_its_handler_cannot_run_yet():
    """As in a collective: the main thread is in C, and another one asks."""
    heard: list = []
    ear = SignalEar()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("handler"))
    read, write = os.pipe()

    def send_and_ask():
        assert not ear.heard()
        send(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not ear.heard() and time.monotonic() < deadline:
            time.sleep(0.001)
        heard.append(ear.number)
        os.write(write, b"go on")

    try:
        thread = threading.Thread(target=send_and_ask)
        threading.Timer(0.0, thread.start).start()
        os.read(read, 1)  # after the signal, which interrupts it, the handler runs
        thread.join()
        assert sorted(heard, key=str) == [signal.SIGTERM, "handler"]
        assert not SignalEar().heard(), "there is room for one; another is deaf"
    finally:
        ear.close()
        signal.signal(signal.SIGTERM, before)
        os.close(read)
        os.close(write)
    assert signal.set_wakeup_fd(-1) == -1


def test_what_somebody_else_handles_is_not_heard():
    """Some schedulers send SIGTERM with another meaning than to end."""
    before, came = signal.signal(signal.SIGTERM, lambda *_: came.append(1)), []
    ear = SignalEar()
    try:
        send(signal.SIGTERM)
        assert came and not ear.heard()
    finally:
        ear.close()
        signal.signal(signal.SIGTERM, before)


def test_signals_of_a_forked_child_are_not_heard():
    """A reward that ends its sandboxes by SIGTERM does not end the run."""
    with signals_in_order():
        ear = SignalEar()
        try:
            end_a_forked_child()
            assert not ear.heard()
            with pytest.raises(Terminated):
                send(signal.SIGTERM)
            assert ear.heard()
        finally:
            ear.close()


def test_another_thread_does_not_close_what_python_writes_to():
    ear = SignalEar()
    thread = threading.Thread(target=ear.close)
    thread.start()
    thread.join()
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor != -1 and os.fstat(descriptor)
    signal.set_wakeup_fd(descriptor)
    ear.close()
    assert signal.set_wakeup_fd(-1) == -1

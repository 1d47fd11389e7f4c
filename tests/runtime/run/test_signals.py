import os
import signal
import sys
import threading
import time

import pytest

from nemorl.runtime.store.files import WorkerDied, WorkerTimeout
from nemorl.runtime.watch.callbacks import Terminated, signals_raise, update_in_progress
from nemorl.runtime.workers import cluster

BOTH = pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_sigterm_raises_once_and_the_old_handler_comes_back():
    with pytest.raises(Terminated) as caught, signals_raise():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)  # while the checkpoint is written: ignored
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_others_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with signals_raise():
            send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_sigterm_while_ray_starts_is_ours(monkeypatch: pytest.MonkeyPatch):
    """Ray's handler would end the process as if somebody's code had."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        send(signal.SIGTERM)

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(Terminated), signals_raise():
        cluster._initialize("local", {})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_changes_nothing():
    found = []

    def work():
        with signals_raise(), update_in_progress():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@BOTH
def test_a_signal_waits_for_the_end_of_an_update(number, error, capfd):
    done = []
    with pytest.raises(error), signals_raise():
        with update_in_progress():
            send(number)
            done.append("step")
        done.append("never")
    said = "the run ends after this step; a second signal (Ctrl-C) ends it at once"
    assert done == ["step"] and said in capfd.readouterr().err


@BOTH
def test_a_signal_raises_at_once_before_and_after_an_update(number, error):
    with pytest.raises(error), signals_raise(), update_in_progress(lambda: False):
        send(number)
        raise AssertionError
    with pytest.raises(error), signals_raise():
        with update_in_progress():
            pass
        send(number)
        raise AssertionError


@BOTH
def test_a_second_signal_raises_at_once(number, error):
    done = []
    with pytest.raises(error), signals_raise(), update_in_progress():
        send(signal.SIGINT)
        done.append("a while")
        send(number)
        done.append("never")
    assert done == ["a while"]


def test_an_error_in_an_update_comes_before_the_signal_that_waited():
    with signals_raise():
        with pytest.raises(ZeroDivisionError), update_in_progress():
            send(signal.SIGTERM)
            raise ZeroDivisionError
        with update_in_progress():
            pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


DEATH = WorkerDied("rank 1 died")


@BOTH
@pytest.mark.parametrize("found", [DEATH, WorkerTimeout("rank 1 hung")])
def test_a_signal_that_waits_for_ranks_that_are_gone_raises(number, error, found):
    """Otherwise the run would begin again with new ranks, although it was asked to end."""
    with (
        pytest.warns(match="rank 1"),
        pytest.raises(error) as caught,
        signals_raise(),
        update_in_progress(),
    ):
        send(number)
        raise found
    assert caught.value.__cause__ is found
    with pytest.raises(type(found)), signals_raise(), update_in_progress():
        raise found


def test_a_forked_child_is_ended_by_its_first_signal():
    """Otherwise Process.terminate() of a data loader's worker would never end it."""
    ready, tell = os.pipe()
    with signals_raise(), update_in_progress():
        child = os.fork()
        if child == 0:
            try:
                os.write(tell, b"!")
                time.sleep(20)
                os._exit(0)
            finally:
                os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
    assert os.WEXITSTATUS(status) == 7


@BOTH
def test_a_block_in_a_block_does_not_end_the_waiting(number, error):
    """As where a logger writes a record in the loop's own block."""
    done = []
    with pytest.raises(error), signals_raise():
        with update_in_progress():
            with update_in_progress():
                send(number)
            done.append("record")
        done.append("never")
    assert done == ["record"]

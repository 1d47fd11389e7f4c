"""What is made of the answers of ranks, without any."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.runtime.ranks import group as module
from nemorl.runtime.ranks.group import Answer, Place, Standstill, Status, gather, worst
from nemorl.runtime.run.errors import WorkerDied, WorkerTimeout

FINE = Answer("value", 1, 5)


def failed(message: str, kind: str = "RuntimeError", builtin: str = "RuntimeError") -> Answer:
    return Answer(
        "error", {"kind": kind, "builtin": builtin, "message": message, "traceback": "trace"}, 5
    )


class Fake:
    """Ranks that answer what `answers` says when so many seconds have passed."""

    size = 2

    def __init__(
        self,
        answers: Callable[[float], Mapping[int, Answer]],
        statuses: Mapping[int, Status] = {},
        log: Path | None = None,
    ) -> None:
        self.answers, self.found, self.log, self.began = answers, statuses, log, time.monotonic()

    def poll(self, wait_s):
        time.sleep(min(wait_s, 0.01))
        return self.answers(time.monotonic() - self.began)

    def place(self, rank):
        return Place(rank=rank, host="node", pid=100 + rank, log=self.log)

    def statuses(self, timeout_s):
        return self.found

    def note(self, rank):
        return "not a word"

    def start(self, method, /, *args, **kwargs):
        return self

    def shutdown(self, timeout_s, farewell=None):
        pass


def gathered(fake: Fake, timeout_s: float = 0.1, **options):
    return gather(
        fake,
        fake,
        phase="train_step of optimizer step 3",
        timeout_s=timeout_s,
        limit="runtime.timeout_s",
        **options,
    )


def test_all_answers_come_back():
    assert gathered(Fake(lambda passed: {0: FINE} if passed < 0.05 else {0: FINE, 1: FINE}), 5) == {
        0: FINE,
        1: FINE,
    }


def test_an_error_of_one_rank_is_not_waited_upon_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ALONE_S", 0.05)
    bad = failed("broken")
    assert gathered(Fake(lambda passed: {1: bad}), 60) == {1: bad}
    monkeypatch.setattr(module, "ALONE_S", 60)
    assert gathered(Fake(lambda passed: {1: bad} if passed < 0.05 else {1: bad, 0: bad}), 60) == {
        0: bad,
        1: bad,
    }


def test_a_death_is_told_with_what_it_was_at_and_the_end_of_its_log(tmp_path: Path):
    (tmp_path / "rank-1.log").write_text("first\nlast words\n", encoding="utf-8")

    def die(passed):
        raise WorkerDied("", rank=1, host="", pid=0, reason="it was killed by SIGKILL")

    with pytest.raises(WorkerDied) as caught:
        gathered(Fake(die, log=tmp_path / "rank-1.log"))
    lines = str(caught.value).splitlines()
    log = tmp_path / "rank-1.log"
    assert (
        lines[0]
        == "rank 1 (process 101 on node) died in train_step of optimizer step 3: it was killed by"
        f" SIGKILL; its log is {log} and ends:"
    )
    assert lines[-1] == "  | last words" and (
        caught.value.rank,
        caught.value.pid,
        caught.value.host,
    ) == (1, 101, "node")


def status(rank: int, *frames: str) -> Status:
    return Status(rank=rank, step=2, phase="train_step", seconds=7.0, frames=frames)


COLLECTIVE = ("torch/distributed/distributed_c10d.py:3000 all_reduce", "loss.py:3 loss")


@pytest.mark.parametrize(
    ("answers", "statuses", "named"),
    [
        (
            {},
            {0: status(0, *COLLECTIVE), 1: status(1, "mine.py:3 loss")},
            "rank 1 (process 101 on node) hung",
        ),
        ({}, {0: status(0, *COLLECTIVE)}, "rank 1 (process 101 on node) hung"),
        (
            {},
            {0: status(0, "mine.py:3 loss"), 1: status(1, *COLLECTIVE)},
            "rank 0 (process 100 on node) hung",
        ),
        (
            {},
            {0: status(0, *COLLECTIVE), 1: status(1, *COLLECTIVE)},
            "rank 0 (process 100 on node) and rank 1 (process 101 on node) hung",
        ),
        ({0: FINE}, {0: status(0), 1: status(1, *COLLECTIVE)}, "rank 1 (process 101 on node) hung"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(answers, statuses, named):
    with pytest.raises(WorkerTimeout) as caught:
        gathered(Fake(lambda passed: answers, statuses))
    lines = str(caught.value).splitlines()
    assert (
        lines[0]
        == f"{named} in train_step of optimizer step 3: no answer within 0.1 s (runtime.timeout_s)."
        " What every rank was doing:"
    )
    assert len(lines) == 3 and lines[1].startswith(
        "  rank 0 (process 100 on node): 7.0 s in train_step, after 2 optimizer steps"
    )
    assert ("not a word" in lines[2]) == (1 not in statuses)


def test_what_a_rank_is_at_is_told_in_code_that_a_reader_knows():
    """The innermost frame, and then those that are not torch's."""
    told = str(
        status(
            0,
            "torch/_ops.py:1 wait",
            "torch/distributed/a.py:2 b",
            "<frozen importlib>:3 c",
            "nemorl/x.py:4 step",
            "mine.py:5 loss",
        )
    )
    assert told.endswith("at torch/_ops.py:1 wait < nemorl/x.py:4 step < mine.py:5 loss")


def test_time_in_which_the_driver_itself_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
):
    """As by Ctrl-Z: the ranks' answers are there, but nobody has read them."""
    clock = iter([0.0, 0.1, 5000.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock, 5000.1))
    fake = Fake(dict)
    calls = iter([{}, {}, {0: FINE, 1: FINE}])
    fake.poll = lambda wait_s: next(calls)
    assert gathered(fake, 10) == {0: FINE, 1: FINE}


def test_the_cause_is_told_and_not_what_follows_from_it():
    gone = failed("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")
    error = worst({0: gone, 1: failed("only here", "ZeroDivisionError", "ZeroDivisionError")})
    assert isinstance(error, ZeroDivisionError) and str(error) == "only here"
    assert "closed by peer" in str(
        worst({0: gone, 1: failed("remote process exited", "DistBackendError")})
    )
    own = KeyError("of this process")
    assert worst({0: Answer("error", {"kind": "KeyError", "message": ""}, 1, own)}) is own


WAITS, WORKS = ("torch/distributed/distributed_c10d.py:1 all_reduce",), ("mine.py:5 loss",)


def test_after_a_signal_ranks_that_do_not_move_are_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SIGNAL_S", 0.05)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    statuses = {0: status(0, *WAITS), 1: status(1, *WORKS)}
    assert gathered(
        Fake(lambda passed: {} if passed < 0.3 else {0: FINE, 1: FINE}, statuses), 60
    ), "no signal, no limit"
    monkeypatch.setattr(module, "signal_came", lambda: True)
    with (
        pytest.warns(UserWarning, match="rank 1 .* hung"),
        pytest.raises(WorkerTimeout, match=r"rank 1 .*no answer within 0\.05 s after a signal"),
    ):
        gathered(Fake(lambda passed: {}, statuses), 60)
    resting = {
        rank: replace(status(rank), phase="waiting for a call") for rank in (0, 1)
    }  # as ranks whose checkpoint is written beside
    monkeypatch.setattr(module, "BLIND_S", 0.05)
    found = gathered(
        Fake(lambda passed: {} if passed < 0.3 else {0: FINE, 1: FINE}, resting),
        60,
        in_background=True,
    )
    assert found == {0: FINE, 1: FINE}


def test_who_answers_soon_is_not_asked_what_it_does(monkeypatch: pytest.MonkeyPatch):
    """Under torchrun that takes seconds, of which a scheduler's notice leaves few."""
    monkeypatch.setattr(module, "signal_came", lambda: True)
    fake = Fake(lambda passed: {} if passed < 0.3 else {0: FINE, 1: FINE})
    monkeypatch.setattr(fake, "statuses", lambda timeout_s: pytest.fail("asked"))
    assert gathered(fake, 60) == {0: FINE, 1: FINE}


@pytest.mark.parametrize(
    ("first", "second", "limit"),
    [
        ({0: WAITS, 1: WORKS}, {0: WAITS, 1: WORKS}, 20.0),
        ({0: WAITS, 1: WAITS}, {0: WAITS, 1: WAITS}, 20.0),
        ({0: WAITS}, {0: WAITS}, 20.0),  # the other does not even say what it is doing
        ({0: WAITS, 1: WORKS}, {0: WAITS, 1: ("mine.py:6 loss",)}, None),
        ({0: WORKS, 1: WORKS}, {0: WORKS, 1: WORKS}, None),
    ],
    ids=["one hangs", "all wait", "one is stopped", "one moves", "all compute"],
)
def test_what_a_standstill_is(first, second, limit, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    still = Standstill()
    assert still.limit({rank: status(rank, *frames) for rank, frames in first.items()}, 2) is None
    now[0] += 21
    found = {rank: status(rank, *frames) for rank, frames in second.items()}
    assert still.limit(found, 2) == limit
    now[0] += 61
    assert still.limit(found, 2) == (limit or 60.0 if WORKS in second.values() else limit or 20.0)


def test_a_checkpoint_may_take_its_time(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    still = Standstill()
    found = {
        0: replace(status(0, *WAITS), phase="save_checkpoint"),
        1: replace(status(1, *WORKS), phase="save_checkpoint"),
    }
    for _ in range(3):
        assert still.limit(found, 2) is None
        now[0] += 1000

"""Ranks that torchrun has started: what users see of a job."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.group import Answer
from nemorl.runtime.ranks.torchrun import TorchrunGroup
from tests.runtime.cluster.processes import soon_gone


def torchrun(what: str, folder: Path, *, timeout_s: float = 300) -> tuple[int, str]:
    """The exit code of a job of two processes, and what it said."""
    return started(["-m", "tests.runtime.ranks.job", what, str(folder)], timeout_s=timeout_s)


def started(program: list[str], *, timeout_s: float = 300) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", *program]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def test_the_others_follow_rank_zero(model_folder: Path):
    code, said = torchrun("everything", model_folder)
    assert code == 0, said
    assert (
        said.count("did everything") == 2
        and "farewell of run 0" in said
        and "farewell of run 1" in said
    )
    assert "Traceback" not in said.replace("in worker", ""), (
        "what rank 0 has caught is nobody's business"
    )
    assert re.findall(r"groups (\d+)", said) == ["1"] * 4, "those of a run end with it"


def test_the_others_do_not_linger_where_torchrun_is_told_to_end(model_folder: Path):
    """As a scheduler does before the time is up: rank 0 has nothing to tell that they should wait
    for.
    """
    code, said = torchrun("told_to_end", model_folder)
    assert code == 1 and "no farewell" in said and "farewell None" not in said, said


def test_torchruns_report_says_what_was_wrong(tmp_path: Path):
    command = [
        "-m",
        "nemorl",
        "sft",
        "--model.path",
        "model",
        "--data.train",
        "rows.jsonl",
        "--parallel.tp",
        "3",
        "--run.dir",
        str(tmp_path / "run"),
    ]
    code, said = started(command)
    plainly, _, report = said.partition("ChildFailedError")
    assert (
        code == 1
        and plainly.count("nemorl sft: error: parallel must divide the 2 devices that there are")
        == 1
    ), said
    assert "traceback : nemorl sft: parallel must divide the 2 devices that there are" in report, (
        said
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


WHERE = r"\(process \d+ on \S+\)"
THEN = r"(.*\n)+.*ChildFailedError(.*\n)+"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raising_alone", r"rank 1 \(process \d+ on \S+\) failed alone in train_step after 0 .*:\nTraceback(.*\n)+ZeroDivisionError: only here"),
        ("asleep", r"rank 1 \(process \d+ on \S+\) hung in train_step after 0 optimizer steps: no answer within 3 s. What every rank was doing:\n"
                   r"  rank 0 .*: \d\.\d s in train_step, after 0 .*torch/distributed/.*\n  rank 1 .* asleep < "),
        pytest.param("stopped", r"rank 1 \(process \d+ on \S+\) hung in train_step(.*\n)+.*it does not even say what it is doing",
                     marks=pytest.mark.slow),
        ("killed", rf"rank 1 {WHERE} died in train_step (of optimizer step 1|after 0 optimizer steps): its process is gone; {THEN} *exitcode *: -9"),
        ("leader_killed", rf"(?m)^rank 0 {WHERE} died in train_step after 0 optimizer steps: its process is gone; {THEN}"),
        ("killed_in_a_pause", rf"rank 1 {WHERE} died in the wait for rank 0's next call after 0 optimizer steps: its process is gone; {THEN}"),
        ("signalled_while_the_other_hangs",
         rf"(?m)^rank 1 {WHERE} hung in train_step after 0 optimizer steps: no answer within 1 s after a signal, in which no rank moved. What every "
         rf"rank was doing:\n  rank 0 .*torch/distributed/.*\n  rank 1 .* asleep_and_signalled < {THEN} *exitcode *: 143"),
        ("raising", r"FloatingPointError: the loss must be finite, but it is nan on rank 0"),
    ],
    ids=["raising_alone", "asleep", "stopped", "killed", "leader_killed", "killed_in_a_pause", "signalled", "raising"],
)  # fmt: skip
def test_a_job_that_fails_ends_and_says_why(model_folder: Path, what: str, told: str):
    code, said = torchrun(what, model_folder)
    assert code == 1 and re.search(told, said), said
    assert "alone" in what or not re.search("failed alone|closed by peer|reset by peer", said), (
        "nobody is to be blamed but the one"
    )
    assert soon_gone(*map(int, re.findall(r"follower (\d+)", said)))


class FakePeers:
    """Two ranks without the other one: what rank 0 does is written down, and a signal comes where
    `signals` says.
    """

    size = 2

    def __init__(self, signals: dict[str, list[int]]) -> None:
        self.signals, self.seen, self.host = signals, [], self

    def _at(self, place: str) -> None:
        for number in self.signals.get(place, []):
            signal.raise_signal(number)
        self.seen.append(place)

    def broadcast(self, message):
        self._at("broadcast")

    def perform(self, method, args, kwargs, limit_s=0.0):
        self._at("perform")
        return Answer("value", None, 1)

    def report(self, ticket, answer):
        self._at("report")

    def leave(self):
        self.seen.append("leave")

    def close(self, *, in_order):
        self.seen.append("close in order" if in_order else "close")


def group_of(peers: FakePeers) -> TorchrunGroup:
    group = object.__new__(TorchrunGroup)
    group._peers, group._runtime, group.size, group._lock, group._tickets, group._ended = (
        peers, RuntimeConfig(), 2, threading.Lock(), itertools.count(), False)  # fmt: skip
    return group


class Told(Exception):
    """What a handler raises."""


@pytest.mark.parametrize("method", ["get_logprobs", "train_step", "export_next", "setup"])
@pytest.mark.parametrize("place", ["broadcast", "perform", "report"])
def test_a_signal_waits_until_rank_zero_has_done_its_part(method, place):
    """Else the others would wait for it in a collective, while it goes on to save."""
    came = []

    def handle(number, frame):
        came.append((number, len(peers.seen)))
        raise Told

    numbers = [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        peers = FakePeers({place: [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]})
        with pytest.raises(Told):
            group_of(peers).start(method)
        assert peers.seen == ["broadcast", "perform", "report"]
        assert came == [(signal.SIGTERM, 3), (signal.SIGINT, 3)]
        assert [signal.getsignal(number) for number in numbers] == [handle, handle]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_follower_that_is_gone_is_bidden_no_farewell(monkeypatch: pytest.MonkeyPatch):
    peers, printed = FakePeers({}), []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def broadcast(message):
        raise RuntimeError("[gloo] Connection closed by peer")

    peers.broadcast = broadcast
    group_of(peers).shutdown(5.0)
    assert peers.seen == ["leave", "perform", "close"] and not printed

"""Ranks that torchrun has started: rank 0 drives and computes, the others follow it through a gloo
group of their own.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from nemorl.checks import require
from nemorl.runtime.config.runtime import RuntimeConfig
from nemorl.runtime.ranks.following import FollowedRunFailed
from nemorl.runtime.ranks.group import ALONE_S, Answer, Place, Status, is_consequence
from nemorl.runtime.ranks.peers import Peers
from nemorl.runtime.ranks.rank import BESIDE
from nemorl.runtime.ranks.wire import dumps, loads


class TorchrunGroup:
    """The ranks of a torchrun as rank 0 sees them, itself among them: what it starts it has done
    when `start` returns.
    """

    def __init__(
        self, backend: str, size: int, *, device: str | None, runtime: RuntimeConfig
    ) -> None:
        self._peers = Peers(backend, device)
        require(size == self._peers.size, "parallel", f"must ask for the {self._peers.size} processes that torchrun has started", size,
                "change a degree, or --nproc-per-node")  # fmt: skip
        self.size, self._runtime = size, runtime
        self._lock, self._tickets, self._ended = threading.Lock(), itertools.count(), False

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> LeaderCall:
        limit_s = self._runtime.start_timeout_s if method == "setup" else self._runtime.timeout_s
        payload = dumps((args, kwargs))  # what can't be sent is nobody's call
        with (
            signals_held()
        ):  # the others are in the midst of a collective where this rank leaves one
            with self._lock:  # every rank gets the calls in the same order
                ticket = next(self._tickets)
                try:
                    self._peers.broadcast((ticket, method, limit_s, payload))
                except RuntimeError as error:  # somebody is gone, as `poll` finds
                    return LeaderCall(self._peers, ticket, self._peers.host.refuse(error))
            if method not in BESIDE:
                answer = self._peers.perform(method, args, kwargs, limit_s)
                self._peers.report(ticket, answer)
                return LeaderCall(self._peers, ticket, answer)
        answer = self._peers.host.beside(method, args, kwargs)
        if isinstance(answer.error, KeyboardInterrupt | SystemExit):
            raise answer.error
        self._peers.report(ticket, answer)
        return LeaderCall(self._peers, ticket, answer)

    def place(self, rank: int) -> Place:
        return self._peers.place(rank)

    def statuses(self, timeout_s: float) -> dict[int, Status]:
        return self._peers.statuses(timeout_s)

    def note(self, rank: int) -> str:
        return self._peers.note(rank)

    def shutdown(self, timeout_s: float, farewell: Any = None) -> None:
        """Followers that don't hear of it (they hang, or `timeout_s` is 0) are ended by torchrun
        when this process ends.
        """
        if self._ended:
            return
        self._ended = True
        heard = threading.Event()
        if timeout_s > 0:
            message = (next(self._tickets), "shutdown", timeout_s, dumps(farewell))
            told = threading.Thread(
                target=self._say, args=(message, heard), daemon=True
            )  # which hangs where a follower does
            told.start()
            told.join(timeout_s)
        self._peers.leave()
        self._peers.host.perform("shutdown", (), {})
        self._peers.close(in_order=heard.is_set())

    def _say(self, message: Any, heard: threading.Event) -> None:
        with suppress(
            RuntimeError
        ):  # a follower that is gone needs no farewell; the others end by themselves
            self._peers.broadcast(message)
            heard.set()


class LeaderCall:
    """A call that rank 0 has returned from, and the others perhaps not yet."""

    def __init__(self, peers: Peers, ticket: int, answer: Answer) -> None:
        self._peers, self._ticket, self._answer = peers, ticket, answer
        self._listened = False

    def poll(self, wait_s: float) -> Mapping[int, Answer]:
        own = {0: self._answer}
        everyone = self._peers.returned(self._ticket, wait_s)
        failed = self._peers.failures(self._ticket)
        errors = [answer for answer in (self._answer, *failed.values()) if answer.kind == "error"]
        silent = (
            bool(errors)
            and all(is_consequence(answer.value) for answer in errors)
            and not self._listened
        )
        self._listened |= silent  # once: it takes SILENT_S
        if not everyone and (death := self._peers.death(silent=silent)) is not None:
            raise death
        if everyone:
            self._peers.finished(self._ticket)
            own = {
                rank: Answer("value", None, self._answer.step) for rank in range(self._peers.size)
            } | own
        return own | {rank: answer for rank, answer in failed.items() if rank}


def follow(backend: str, *, timeout_s: float, device: str | None) -> Any:
    """What the ranks other than 0 do until rank 0 shuts them down; returns what it says then.

    Raises FollowedRunFailed where it says nothing and the process has been told to end.
    """
    peers = Peers(backend, device)
    with _signals_left_to_rank_zero():
        while True:
            try:
                ticket, method, limit_s, payload = peers.broadcast()
            except RuntimeError:
                peers.wait_for_the_end()
                raise
            if method == "shutdown":
                peers.leave()
                told_to_end, farewell = peers.ear.heard(), loads(payload)
                peers.host.perform("shutdown", (), {})
                peers.close(in_order=True)
                if farewell is None and told_to_end:
                    raise FollowedRunFailed
                return farewell
            args, kwargs = loads(payload)
            if method in BESIDE:
                threading.Thread(
                    target=lambda t, *call: peers.report(t, peers.host.beside(*call)),
                    args=(ticket, method, args, kwargs),
                ).start()
                continue
            answer = peers.perform(
                method, args, kwargs, limit_s if method == "setup" else timeout_s
            )
            peers.report(ticket, answer)
            if answer.kind == "error" and not peers.returned(
                ticket, 2 * ALONE_S
            ):  # the watch ends the process where it knows of a death
                peers.end(
                    f"{peers.place(peers.rank)} failed alone in {method} after {answer.step}"
                    f" optimizer steps:\n{answer.value['traceback']}"
                )


@contextmanager
def signals_held() -> Iterator[None]:
    """A block that neither SIGINT nor SIGTERM parts: they come to whoever handles them when it is
    over, each once. Only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # signals don't come here
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if number not in held:
            held.append(number)

    def deliver() -> None:
        with ExitStack() as stack:  # all of them, though the first one raises
            for number in reversed(held):
                stack.callback(signal.raise_signal, number)

    with ExitStack() as stack:
        stack.callback(deliver)
        for number in (signal.SIGINT, signal.SIGTERM):
            if (before := signal.getsignal(number)) is not None:  # None: not Python's
                stack.callback(signal.signal, number, before)
                signal.signal(number, hold)
        yield


@contextmanager
def _signals_left_to_rank_zero() -> Iterator[None]:
    """Ctrl-C and SIGTERM reach all processes of the job: rank 0 saves and shuts down, for which it
    needs the others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }  # not SIG_IGN: they are to be heard
    for number in before:
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

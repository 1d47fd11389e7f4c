"""What runs in a replica's process: one thread that owns the engine and steps it all the time, and
the calls that it answers between steps.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nemorl.runtime.engines.engine import Engine
from nemorl.runtime.engines.spec import EngineSpec, Finished, Request

GATHER_S = 0.05
"""Once a request is finished, how long an answer waits for others to go with it while the engine is
busy.
"""

Command = Callable[[Engine], Any]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a replica has done."""

    finished: tuple[Finished, ...] = ()
    """Since the last answer."""
    num_tokens: int = 0
    """Generated since it started."""
    busy_s: float = 0.0
    """Seconds that it computed, since it started."""


class VLLMWorker:
    """The target of a worker group: an engine whose calls may come at any time and in any order.

    Calls say which round of generation they belong to. The first call of a new round ends the ones
    before: their requests are dropped, and their late calls do nothing.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Command, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._round = 0
        # Changed by the engine's thread alone, and all of them of one round:
        self._present = 0
        self._submitted: set[int] = set()
        self._finished: list[Finished] = []
        self._error: Exception | None = None
        self._num_tokens, self._busy_s = 0, 0.0

    def start(self, spec: EngineSpec) -> None:
        """Start the engine. Raises EngineStartError."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(spec, started), name="engine", daemon=True
        )
        self._thread.start()
        started.result()

    def devices(self) -> str:
        """The GPUs that Ray has given it, with commas."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def submit(self, round: int, requests: Sequence[Request]) -> None:
        """Have these generated; `poll` brings the results."""

        def add(engine: Engine) -> None:
            if self._present == round:
                engine.add(requests)
                self._submitted.update(request.id for request in requests)

        self._do(add, round)

    def poll(self, round: int, timeout_s: float) -> Progress:
        """Wait until something is finished, until nothing is left to do, or for so long.

        Raises what the engine raised, which ends its requests.
        """
        with self._changed:
            self._enter(round)
            self._changed.wait_for(
                lambda: self._news(round) or (self._finished and self._present == round), timeout_s
            )
            self._changed.wait_for(lambda: self._news(round), GATHER_S if self._finished else 0)
            if self._present != round:
                return Progress()
            error, self._error = self._error, None
            if error is not None:
                raise error
            finished, self._finished = tuple(self._finished), []
            return Progress(finished=finished, num_tokens=self._num_tokens, busy_s=self._busy_s)

    def recall(self, round: int, ids: Sequence[int]) -> list[int]:
        """Drop those of the requests that have not begun, and say which."""

        def recall(engine: Engine) -> list[int]:
            dropped = engine.recall(ids) if self._present == round else []
            self._settle(dropped)
            return dropped

        return self._do(recall, round)

    def abort(self, round: int) -> None:
        """Drop whatever belongs to earlier rounds."""
        self._do(lambda engine: None, round)

    def begin_weights(self) -> None:
        def begin(engine: Engine) -> None:
            self._settle(list(self._submitted))
            engine.begin_weights()

        self._do(begin)

    def load_weights(self, payload: Any) -> None:
        self._do(lambda engine: engine.load_weights(payload))

    def finish_weights(self) -> None:
        self._do(Engine.finish_weights)

    def sleep(self) -> None:
        self._do(Engine.sleep)

    def wake(self) -> None:
        self._do(Engine.wake)

    def shutdown(self) -> None:
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _news(self, round: int) -> bool:
        """Whether there is nothing to wait for in this round."""
        over = self._present == round and (not self._submitted or self._error is not None)
        return over or round < self._round

    def _enter(self, round: int) -> None:
        with self._changed:
            if round > self._round:
                self._round = round
                self._commands.put(
                    (lambda engine: None, Future())
                )  # so that the engine's thread finds out

    def _do(self, command: Command, round: int = 0) -> Any:
        """Let the engine's thread execute this between two steps."""
        answer: Future[Any] = Future()
        self._enter(round)
        self._commands.put((command, answer))
        return answer.result()

    def _run(self, spec: EngineSpec, started: Future[None]) -> None:
        os.environ.setdefault(
            "VLLM_LOGGING_LEVEL", "INFO"
        )  # all that it says goes into a log of its own
        try:
            engine = Engine(spec)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while True:
            while not engine.unfinished or not self._commands.empty():
                item = self._commands.get()
                if item is None:
                    engine.shutdown()
                    return
                command, answer = item
                self._begin_round(engine)
                try:
                    answer.set_result(command(engine))
                except Exception as error:
                    answer.set_exception(error)
            self._step(engine)

    def _begin_round(self, engine: Engine) -> None:
        with self._changed:
            if self._present != self._round:
                engine.abort(self._submitted)
                self._submitted.clear()
                self._finished.clear()
                self._error, self._present = None, self._round
                self._changed.notify_all()

    def _step(self, engine: Engine) -> None:
        begin = time.perf_counter()
        try:
            finished = engine.step()
        except Exception as error:
            engine.give_up()
            self._error = (
                error
                if engine.usable
                else RuntimeError(f"the engine can't go on after this: {error}")
            )
            self._settle(list(self._submitted))
            return
        self._busy_s += time.perf_counter() - begin
        self._num_tokens = engine.num_tokens
        self._settle([result.id for result in finished], finished)

    def _settle(self, ids: Sequence[int], finished: Sequence[Finished] = ()) -> None:
        if ids:
            with self._changed:
                self._finished += finished
                self._submitted.difference_update(ids)
                self._changed.notify_all()

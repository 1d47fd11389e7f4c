"""Requests to an engine that computes in the threads of its callers."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from nemorl.data.batch import TokenBatch, collate
from nemorl.losses.logprobs import LogprobKind
from nemorl.models.hub import max_positions
from nemorl.rollout.calls import forget_error
from nemorl.rollout.generation import (
    Completion,
    SamplingParams,
    Scores,
    check_in_flight,
    check_ready,
    check_scored,
    checked_requests,
    seeded,
)

T = TypeVar("T")

PAUSE_S = 0.01
"""How often a request looks whether a sleeping engine is awake."""
WAITING: ContextVar[Callable[[Callable[[], None]], None] | None] = ContextVar(
    "WAITING", default=None
)
"""Runs a function in the thread that waits for an event loop; None: no thread does."""


@dataclass(eq=False)
class Request:
    """One prompt, which gets `params.n` completions."""

    prompt: Sequence[int]
    params: SamplingParams
    future: Future[list[Completion]] = field(default_factory=Future)
    """Cancelled where nobody awaits the answer any more."""
    parts: list[Any] = field(default_factory=list)

    def answer(self, completions: list[Completion]) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(completions)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # an interrupt is the interrupted thread's
            self.future.cancel()
        elif not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_Awaited = tuple[Request, asyncio.Future[list[Completion]]]


class Scheduler:
    """The one place from which an engine is stepped.

    `step(new, dropped)` takes new requests, drops others, computes for a moment, and answers what
    is finished. For an event loop, the thread that waits for it computes (`WAITING`), or the loop
    itself: an engine and a trainer in two threads, each with a pool of PyTorch's, would compete for
    cores.
    """

    def __init__(self, step: Callable[[list[Request], list[Request]], None]) -> None:
        self.step = step
        self.policy_version: int | None = 0
        self.asleep = self.closed = False
        self.lock = threading.RLock()
        """Held during a step, and by all that must not happen during one."""
        self._new: deque[Request] = deque()
        self._open: list[Request] = []
        self._loops: MutableMapping[
            asyncio.AbstractEventLoop, tuple[asyncio.Task[None], list[_Awaited]]
        ] = WeakKeyDictionary()

    @property
    def busy(self) -> bool:
        return any(not request.future.done() for request in (*self._new, *self._open))

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "the generation backend must not be used after shutdown(): make a new one"
            )
        check_ready(asleep=self.asleep, failed=self.policy_version is None)

    async def sample(self, request: Request) -> list[Completion]:
        self.check()
        self._new.append(request)
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            awaited: list[_Awaited] = []
            task = loop.create_task(self._take_turns(awaited))
            task.add_done_callback(forget_error)
            self._loops[loop] = task, awaited
        answer = loop.create_future()
        self._loops[loop][1].append((request, answer))
        try:
            return await answer
        finally:
            request.future.cancel()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the answers to requests, in order; after an error none goes on."""
        self.check()
        self._new.extend(requests)
        try:
            while not all(request.future.done() for request in requests):
                self._turn_once()
                if self.asleep:
                    time.sleep(PAUSE_S)
            return [completion for request in requests for completion in request.future.result()]
        finally:
            for request in requests:
                request.future.cancel()

    @contextmanager
    def updating(self, version: int, in_flight: str, *, shared: bool = False) -> Iterator[None]:
        """Change the weights inside the block, between two steps; no step sees a failed change.

        shared: the trainer has changed them already, so that no request can finish with the old.
        """
        check_in_flight(in_flight)
        with self.lock:
            if in_flight == "wait" and self.busy:
                if shared:
                    raise RuntimeError(
                        "in_flight='wait' needs the old weights, but this engine computes on the"
                        " trainer's own: await the requests before the trainer's step, or use"
                        " in_flight='keep'"
                    )
                self.check()
                self._advance(self._taken())
                while self._open:
                    self._advance([])
            self.policy_version = None
            try:
                yield
            except BaseException:
                self.fail(
                    RuntimeError(
                        "an update of the weights failed while the request was in flight: call"
                        " update_weights() with all of them, and sample again"
                    )
                )
                raise
            self.policy_version = version

    def shutdown(self) -> None:
        with self.lock:
            self.closed = True
            self.fail(RuntimeError("the generation backend was shut down before it answered"))
            self._open = []

    def fail(self, error: BaseException) -> None:
        with self.lock:
            for request in (*self._open, *self._taken()):
                request.fail(error)

    async def between_steps(self, compute: Callable[[], T]) -> T:
        """Return what a function returns that is called between two steps, where these compute."""

        def call() -> T:
            with self.lock:
                self.check()
                return compute()

        return await _where_steps_compute(call)

    async def _take_turns(self, awaited: list[_Awaited]) -> None:
        """Do steps, and pass on all results of a step at once: they are judged together."""
        loop = asyncio.get_running_loop()
        try:
            while awaited:
                await _where_steps_compute(self._turn_once)
                awaited[:] = [each for each in awaited if not _settled(*each)]
                await asyncio.sleep(PAUSE_S if self.asleep else 0)
        finally:
            del self._loops[loop]
            for each in awaited:  # after an interrupt
                _settled(*each)

    def _turn_once(self) -> None:
        with self.lock:
            if self.closed:
                self.shutdown()
            elif not self.asleep:
                self._advance(self._taken())

    def _taken(self) -> list[Request]:
        new = []
        while self._new:
            new.append(self._new.popleft())
        self._open += new
        return new

    def _advance(self, new: list[Request]) -> None:
        if not self._open:
            return
        dropped = [request for request in self._open if request.future.done()]
        given_up = {*dropped}
        try:
            self.step([request for request in new if request not in given_up], dropped)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        self._open = [request for request in self._open if not request.future.done()]


def unmasked(token_ids: Sequence[Sequence[int]], kind: LogprobKind) -> TokenBatch:
    """Return sequences as a batch: each token gets a log-probability, and none a loss."""
    examples = [
        {"input_ids": ids, "loss_mask": [False] * len(ids), "response_mask": [True] * len(ids)}
        for ids in token_ids
    ]
    return collate(examples, logprob_kind=kind)


def require_finite(finite: bool) -> None:
    """Raise FloatingPointError unless a model's log-probabilities are finite."""
    if not finite:
        raise FloatingPointError(
            "the model's logits are not finite, as its weights hold NaN or infinity: load others,"
            " or lower optimizer.lr"
        )


async def _where_steps_compute(function: Callable[[], T]) -> T:
    waiting, answer = WAITING.get(), Future[T]()
    if waiting is None:
        return function()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)
        finally:
            answer.cancel()  # after an interrupt, which is the waiting thread's

    waiting(call)
    return await asyncio.wrap_future(answer)


def _settled(request: Request, answer: asyncio.Future[list[Completion]]) -> bool:
    """Pass on a request's result. Return whether nobody awaits it any more."""
    if not answer.done() and request.future.done():
        if request.future.cancelled():
            answer.cancel()
        elif error := request.future.exception():
            answer.set_exception(error)
        else:
            answer.set_result(request.future.result())
    return answer.done()


class ScheduledBackend(ABC):
    """What `GenerationBackend`s that compute in the threads of their callers have in common."""

    vocab_size = max_positions = sys.maxsize
    sleeps = True

    def __init__(
        self, step: Callable[[list[Request], list[Request]], None], tokenizer: Any
    ) -> None:
        self.tokenizer, self._scheduler = tokenizer, Scheduler(step)

    @abstractmethod
    def _scored(self, batch: TokenBatch, top_k: int) -> Sequence[Tensor]:
        """Return `[batch, seq]` log-probabilities of a batch's tokens and, unless `top_k` is 0, ids
        and log-probabilities `[batch, seq, k]` of the likeliest ones. Called between two steps.
        """

    @property
    def policy_version(self) -> int | None:
        return self._scheduler.policy_version

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "max_positions": self.max_positions}

    def limits(self, config: Any) -> None:
        self.vocab_size = getattr(config, "vocab_size", sys.maxsize)
        self.max_positions = max_positions(config) or sys.maxsize

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        return await self._scheduler.sample(self._requests([prompt], params)[0])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        return self._scheduler.generate(self._requests(prompts, sampling_params))

    async def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        top_k: int = 0,
        kind: LogprobKind | None = None,
    ) -> Scores:
        """Return `GenerationBackend.score`, of one version of the weights."""
        self._scheduler.check()
        check_scored(token_ids, top_k, **self.sizes)
        if not len(token_ids):
            return Scores(token_logprobs=(), policy_version=self.policy_version)
        batch = unmasked(token_ids, kind or LogprobKind())

        def compute() -> tuple[Sequence[Tensor], int | None]:
            logprobs, *top = self._scored(batch, top_k)
            if top:
                top = [top[0].int(), top[1].float()]
                top[1][:, 0] = -math.inf
            return (logprobs.float(), *top), self.policy_version

        found, version = await self._scheduler.between_steps(compute)
        require_finite(bool(found[0].isfinite().all()))
        rows: Any = (
            tuple(row[: len(ids)] for row, ids in zip(values.numpy(), token_ids, strict=True))
            for values in found
        )
        names = ("token_logprobs", "top_ids", "top_logprobs")
        return Scores(**dict(zip(names, rows, strict=False)), policy_version=version)

    def wake(self) -> None:
        self._scheduler.asleep = False

    def shutdown(self) -> None:
        self._scheduler.shutdown()

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Request]:
        self._scheduler.check()
        params = checked_requests(prompts, sampling_params, **self.sizes)
        return [
            Request(prompt, seeded(p, self.tokenizer))
            for prompt, p in zip(prompts, params, strict=True)
        ]

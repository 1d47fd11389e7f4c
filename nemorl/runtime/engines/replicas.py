"""The driver's side of engines in Ray actors: requests go out, answers come back, and replicas
without weights get them (`Supply`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from nemorl.models.tensor_files import WeightsDiffer
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import InFlight, SamplingParams, Weights, WeightSource
from nemorl.runtime.engines.processes import (
    EngineProcess,
    EngineProcesses,
    check_places,
    warn_softly,
)
from nemorl.runtime.engines.routing import (
    TICK_S,
    Action,
    Answered,
    Arrived,
    Asleep,
    Broke,
    Cancel,
    Cancelled,
    End,
    Event,
    Give,
    Held,
    Published,
    Reply,
    RequestRouter,
    Start,
    Stopped,
    Supplied,
    Warn,
    routing,
)
from nemorl.runtime.engines.spec import Answer, EngineSpec, Sample
from nemorl.runtime.engines.weights import (
    Place,
    Transport,
    UpdateReceipt,
    WeightSender,
    current_device,
    expected_weights,
    started,
)


class Supply:
    """Sends the newest weights of a source to replicas without any, from any thread."""

    def __init__(
        self,
        config: GenerationConfig,
        spec: EngineSpec,
        processes: EngineProcesses,
        router: RequestRouter,
    ) -> None:
        self.spec, self._processes, self._router = spec, processes, router
        expected, stored = expected_weights(spec.files["config.json"])
        alone = spec.adapter_rank or spec.pipeline_parallel_size > 1
        self._sender = WeightSender(
            actors={},
            places={},
            expected=expected,
            stored=stored,
            dtype=getattr(torch, spec.dtype),
            transport="object_store" if alone else config.weight_transport,
            processes=config.devices_per_replica,
            timeout_s=config.timeout_s,
        )
        self._source: WeightSource = Weights(version=0, tensors=())
        self._version = 0
        self.sending = threading.RLock()
        """Held while weights are sent."""
        self._told: set[str] = set()
        self._based = set[Any]()
        """Ids of the processes that have the weights without adapters."""
        self.transport: Transport | None = None
        self._receipt: UpdateReceipt | None = None

    def update(self, source: WeightSource, in_flight: InFlight = "keep") -> int:
        """Give all replicas that are up the newest weights, and return their version; the others
        get weights before they are used.

        Raises what was wrong; then requests in flight fail, and nothing can be generated until an
        update succeeds.
        """
        router = self._router
        try:
            if in_flight == "wait":
                router.send(Held(True))
                router.do(router.until(lambda state: state.drained))
            with self.sending:
                self._source = source
                router.send(Published(source.newest()[0]))
            while not router.state.supplied:
                router.do(router.until(lambda state: bool(state.over or state.lacking)))
                if router.state.over:
                    raise router.state.over
                self.now()
            return self._version
        except BaseException as error:
            failed = f"an update of the weights failed while the request was in flight: {error}"
            with suppress(Exception):
                router.send(Stopped(RuntimeError(failed)))
            raise
        finally:
            with suppress(RuntimeError):  # it has been shut down meanwhile
                router.send(Held(False))

    def now(self) -> None:
        """Send weights to replicas without any, unless they sleep."""
        with self.sending:
            state = self._router.state
            lacking = () if state.asleep else state.lacking
            processes = [one for id in lacking if (one := self._processes.running.get(id))]
            if processes:
                self._send({one.id.rank: one for one in processes})

    def others(self) -> None:
        """Send weights to replicas that came back. A failure, but for WeightsDiffer, is a warning
        while another has weights.
        """
        try:
            self.now()
        except Exception as error:
            if isinstance(error, WeightsDiffer) or not self._router.state.supplied:
                raise
            if str(error) not in self._told:
                self._told.add(str(error))
                warn_softly(
                    "a replica that came back has no weights yet, and nemorl keeps trying:"
                    f" sending failed: {error}"
                )

    def _send(self, processes: dict[int, EngineProcess]) -> None:
        sender = replace(
            self._sender,
            actors={rank: one.worker.actor for rank, one in processes.items()},
            places={rank: one.place for rank, one in processes.items() if one.place},
            failed={},
        )
        options: dict[str, Any] = {}
        if self.spec.adapter_rank:
            based = {one.id for one in processes.values()} <= self._based
            options["adapters"] = "alone" if based else "apart"
        receipt = self._source.send(sender, dtype=sender.dtype, **options)
        self.transport = receipt.transport
        self._router.check()
        receipt.check()
        for rank, said in receipt.failed.items():
            self._router.send(Broke(processes[rank].id, processes[rank].refused(said)))
        if not receipt.failed:
            self._receipt, self._version = receipt, receipt.version
            if receipt.version < (self._router.state.version or 0):  # an old checkpoint was loaded
                self._router.send(Published(receipt.version))
            self._based |= {one.id for one in processes.values()}
            for one in processes.values():
                self._router.send(Supplied(one.id, receipt.version))

    def metrics(self) -> dict[str, float]:
        last, self._receipt = self._receipt, None
        return {} if last is None else {"weights/proved": float(last.num_weights)}


SHUT_DOWN = "the generation backend was shut down before it answered"

Request = tuple[tuple[int, ...], SamplingParams]


class Replicas:
    """Engines that share the prompts, follow the trainer's weights and outlive their processes.

    `routing.decide` says who answers what. What a replica had not answered when it died or hung is
    done by the others, with the same results: seeds belong to requests.
    """

    processes: type[EngineProcesses] = EngineProcesses

    def __init__(
        self, config: GenerationConfig, spec: EngineSpec, beside: Sequence[Place] = ()
    ) -> None:
        self.config, self.spec = config, spec
        self._open: dict[int, tuple[Request, asyncio.Future[tuple[Sample, ...]]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._device = current_device()
        self._tending: asyncio.Task[None] | None = None
        self._usage: defaultdict[int, defaultdict[str, float]]
        self._usage = defaultdict(lambda: defaultdict(float))
        self._seconds, self._since = 0.0, 0.0
        """With requests in flight; the last time that there were none."""
        self._processes = self.processes(config, spec, beside)
        state = routing(
            config.num_replicas, window=config.max_batch_size, max_restarts=config.max_restarts
        )
        self._router = RequestRouter(state, self._act, self._processes.cluster.check)
        self.supply = Supply(config, spec, self._processes, self._router)
        try:
            self._router.do(self._processes.start_all(self._router))
            # On the trainer's thread: each thread has a current device of its own.
            check_places(config, [one.place for one in self.running() if one.place])
            self._router.do(self._begin())
        except BaseException:
            self.shutdown()
            raise

    def running(self) -> list[EngineProcess]:
        states = [one for one in self._router.state.replicas if one.status == "up"]
        found = [self._processes.running.get(one.process) for one in states]
        return [process for process in found if process]

    def generate(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        self.supply.now()
        return self._router.do(self._answers(requests))

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Sample, ...]:
        """For a task of any event loop."""
        answers = self._answers([(prompt, params)])
        future = asyncio.run_coroutine_threadsafe(answers, self._router.loop)
        return (await asyncio.wrap_future(future))[0]

    async def _begin(self) -> None:
        self._tending = asyncio.create_task(self._tend())

    async def _end(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        await self._processes.end_all()

    async def _tend(self) -> None:
        """Look after replicas that came back, and Ray, while requests are open."""
        router = self._router
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._open:
                    await asyncio.to_thread(router.check)
                if self._open and router.state.lacking:  # the event loop must go on
                    await asyncio.wrap_future(started(self.supply.others, self._device))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                said = error if isinstance(error, Exception) else RuntimeError(repr(error))
                router.note(Stopped(said))

    async def _answers(self, requests: Sequence[Request]) -> list[tuple[Sample, ...]]:
        """On the router's event loop, as all below."""
        futures = [self._ask(request) for request in requests]
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    def _ask(self, request: Request) -> asyncio.Future[tuple[Sample, ...]]:
        if not self._open:
            self._since = time.monotonic()
        number = self._router.state.arrived
        future: asyncio.Future[tuple[Sample, ...]] = self._router.loop.create_future()
        self._open[number] = request, future
        future.add_done_callback(partial(self._settled, number))
        self._router.note(Arrived(request[1].n))
        return future

    def _settled(self, number: int, future: asyncio.Future[tuple[Sample, ...]]) -> None:
        del self._open[number]
        if not self._open:
            self._seconds += time.monotonic() - self._since
        if future.cancelled():
            self._router.note(Cancelled(number))

    def _act(self, action: Action) -> None:
        match action:
            case Give(id, number):
                call = self._call(self._processes.running[id], number, *self._open[number][0])
                self._calls[number] = asyncio.ensure_future(call)
            case Cancel(number):
                if call_of := self._calls.pop(number, None):
                    call_of.cancel()
            case Reply(number, result):
                self._reply(number, result)
            case End(id):
                self._usage[id.rank]["restarts"] += 1
                self._processes.end(id)
            case Start(id):
                self._processes.start(id)
            case Warn(message):
                warn_softly(message)

    def _reply(self, number: int, result: Any) -> None:
        future = self._open[number][1] if number in self._open else None
        if future is None or future.done():  # cancelled just now
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    async def _call(
        self, process: EngineProcess, number: int, prompt: tuple[int, ...], params: SamplingParams
    ) -> None:
        call = process.actor.sample.remote(prompt, params)
        event: Event
        try:
            answer = await process.worker.answer(call)
        except asyncio.CancelledError:
            if process.id in self._processes.running:
                ray.cancel(call)
            raise
        except (ValueError, FloatingPointError) as error:
            event = Answered(process.id, number, error)
        except Exception as error:
            event = Broke(process.id, error)
        else:
            self._use(process, answer)
            event = Answered(process.id, number, answer.samples, answer.partial)
        self._calls.pop(number, None)
        self._router.note(event)

    def _use(self, process: EngineProcess, answer: Answer) -> None:
        usage = self._usage[process.id.rank]
        usage["tokens"] += sum(len(one.token_ids) for one in answer.samples)
        usage["busy_s"] += max(0.0, answer.busy_s - process.busy_s)
        process.busy_s = max(process.busy_s, answer.busy_s)

    def sleep(self) -> None:
        """Give memory back; no replica may start and take memory meanwhile. Requests pause."""
        if self.spec.sleep_level:
            with self.supply.sending:  # not between two calls of an update
                self._router.do(self._sleep())

    async def _sleep(self) -> None:
        await self._router.until(lambda state: state.settled)
        self._router.note(Asleep(True, emptied=self.spec.sleep_level == 2))
        await self._processes.everywhere("sleep")

    def wake(self) -> None:
        if self.spec.sleep_level:
            self._router.do(self._wake())

    async def _wake(self) -> None:
        await self._processes.everywhere("wake")
        self._router.note(Asleep(False))

    def metrics(self) -> dict[str, float]:
        """Return each replica's tokens, restarts and busy share of the time since the last call."""
        measured: dict[str, float] = {}
        now = time.monotonic()
        seconds = self._seconds + (now - self._since if self._open else 0.0)
        for rank in range(self.config.num_replicas):
            name, usage = f"replica_{rank}", self._usage[rank]
            measured[f"{name}/tokens"] = usage["tokens"]
            measured[f"{name}/restarts"] = usage["restarts"]
            if seconds:
                measured[f"{name}/busy"] = min(1.0, usage["busy_s"] / seconds)
                measured[f"{name}/tokens_per_second"] = usage["tokens"] / seconds
        self._usage.clear()
        self._seconds, self._since = 0.0, now
        return {**measured, **self.supply.metrics()}

    def shutdown(self) -> None:
        if self._router.loop.is_closed():
            return
        try:
            with suppress(Exception):  # the cluster may be gone
                self._router.send(Stopped(RuntimeError(SHUT_DOWN)))
                self._router.do(self._end())
            self._router.close()
        finally:
            self._processes.release()

"""The driver's side of engines in Ray actors: their processes, weights (`Supply`) and requests
(`Replicas`).
"""

import asyncio
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from nemorl.checks import require, warn
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import InFlight, Weights, WeightSource
from nemorl.runtime.engines import routing
from nemorl.runtime.engines.engine import EngineActor, environment
from nemorl.runtime.engines.spec import EngineSpec, check_shares
from nemorl.runtime.engines.weights import (
    Place,
    Transport,
    UpdateReceipt,
    WeightSender,
    cards_of,
    current_device,
    expected_weights,
    own_place,
    started,
)
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout, temporary_folder, with_log
from nemorl.runtime.workers.cluster import DRIVER, Bundle, RayVirtualCluster, ResourcesError
from nemorl.runtime.workers.worker import Worker

SHUTDOWN_S = 10.0


@dataclass(eq=False)
class EngineProcess:
    """Holds the workers of a replica: the first stage's, and a pipeline's others."""

    id: routing.ProcessId
    worker: Worker
    place: Place | None = None
    """None: it is not up."""
    busy_s: float = 0.0
    stages: list[Worker] = field(default_factory=list)
    runs: list[asyncio.Future[None]] = field(default_factory=list)
    """Their calls, which end when a stage does."""

    @property
    def actor(self) -> Any:
        return self.worker.actor


class EngineProcesses:
    """Starts, watches and ends processes on the router's event loop, and tells the router."""

    actor: type[EngineActor] = EngineActor

    def __init__(
        self, config: GenerationConfig, spec: EngineSpec, beside: Sequence[Place] = ()
    ) -> None:
        self.config, self.spec, self.beside = config, spec, beside
        self.running: dict[routing.ProcessId, EngineProcess] = {}
        self._keepers: dict[routing.ProcessId, asyncio.Task[None]] = {}
        python, transport = config.python, config.weight_transport
        found = python is None or bool(shutil.which(python))
        require(found, "generation.python", "must be an interpreter", python, "name one")
        works = spec.on_gpus or transport not in ("cuda_ipc", "nccl")
        require(works, "generation.weight_transport", "needs GPUs", transport, "remove it")
        self.cluster, self._placement = self.reserved()
        self._own_logs = ExitStack()
        log_dir = config.log_dir or self._own_logs.enter_context(temporary_folder())
        self._log_dir = Path(log_dir).absolute()

    def reserved(self) -> tuple[Any, Any]:
        """Return the cluster, and the bundles in it, one for each stage of each replica."""
        nodes = [place.node for place in self.beside]
        bundles = engine_bundles(self.config, cuda=self.spec.on_gpus, nodes=nodes)
        try:
            cluster = RayVirtualCluster(bundles)
        except ResourcesError as error:
            text = f"generation.num_replicas is {self.config.num_replicas}: {error}"
            if any(one.node == DRIVER for of_name in bundles.values() for one in of_name):
                text += (
                    "; if Ray has no GPU on this machine, add --generation.trainer-gpus 0: engines"
                    " may then get any of its GPUs"
                )
            raise ResourcesError(text) from None
        return cluster, cluster.placement("generation")

    async def start_all(self, router: routing.RequestRouter) -> None:
        self._router = router
        ids = [one.process for one in router.state.replicas]
        await asyncio.gather(*map(self._start, ids))
        for id in ids:
            router.note(routing.Started(id))
            self.start(id)

    def start(self, id: routing.ProcessId) -> None:
        """Start a process, unless it is there, and watch it."""
        self._keepers[id] = asyncio.ensure_future(self._keep(id))

    async def _keep(self, id: routing.ProcessId) -> None:
        try:
            if id not in self.running:
                begin = time.monotonic()
                await self._start(id)
                warn_softly(f"replica {id.rank} is back after {time.monotonic() - begin:.1f} s")
                self._router.note(routing.Started(id))
            await self._watch(self.running[id])
        except Exception as error:
            self._router.note(routing.Broke(id, error))

    async def _start(self, id: routing.ProcessId) -> None:
        process = self.running[id] = EngineProcess(id, self.launched(id.rank))
        worker, first, limit_s = process.worker, self.spec, self.config.start_timeout_s
        setting = "generation.start_timeout_s"
        up = partial(worker.answer, doing="its start", timeout_s=limit_s, setting=setting)
        stages = range(1, first.pipeline_parallel_size)
        if stages:
            first = await up(worker.actor.meet.remote(first))
        for number in stages:
            stage = self.launched(id.rank, number)
            run = stage.answer(stage.actor.run_stage.remote(replace(first, stage=number)))
            process.stages.append(stage)
            process.runs.append(asyncio.ensure_future(run))
        start = up(worker.actor.start.remote(first))
        place = process.place = await self._unless_broken(process, start)
        worker.host, worker.pid = place.host, place.pid

    async def _unless_broken(self, process: EngineProcess, call: Awaitable[Any]) -> Any:
        """Return a call's result, or raise what ended a stage."""
        own = asyncio.ensure_future(call)
        try:
            await asyncio.wait([own, *process.runs], return_when=asyncio.FIRST_COMPLETED)
            for stage, run in zip(process.stages, process.runs, strict=True):
                if run.done():
                    run.result()  # or its error
                    raise stage.died("one of its workers ended")
            return await own
        finally:
            with suppress(RuntimeError):  # the event loop is closed
                own.cancel()

    def launched(self, rank: int, stage: int = 0) -> Worker:
        placement, config = self._placement, self.config
        number = rank * config.pipeline_parallel_size + stage
        eager = self.spec.engine.get("enforce_eager", True)
        variables = environment(config.cpus_per_replica, eager=eager, cuda=self.spec.on_gpus)
        if self.beside:  # GPUs that for Ray are the ranks', and that it must not hide
            share = rank_shares([place.node for place in self.beside], config)[number]
            shared = [gpu for rank in share for gpu in self.beside[rank].gpus]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        python = {} if config.python is None else {"py_executable": config.python}
        name = f"replica-{rank}" + (f"-stage-{stage}" if stage else "")
        log = self._log_dir / f"{name}.log"
        actor = ray.remote(self.actor).options(
            **placement.options(number),
            max_concurrency=2 * config.max_batch_size + 100,
            runtime_env={"env_vars": variables, **python},
        )
        return Worker(actor.remote(name, str(log)), name, log)

    async def _watch(self, process: EngineProcess) -> None:
        """Raise where a process died, or works without progress for timeout_s."""
        before, idle, worker = -1, 0, process.worker
        period = self.config.timeout_s / 4  # counted: the driver itself may be stopped
        while True:
            await self._unless_broken(process, asyncio.sleep(period))
            call = worker.answer(worker.actor.progress.remote(), timeout_s=period)
            try:
                now, late = await self._unless_broken(process, call), 0
            except WorkerTimeout:
                now, late = before, 1
            works = self._router.state.works(process.id)
            idle = idle + 1 + late if now == before and works else 0
            before = now
            if idle >= 4:
                hangs = f"made no progress for {self.config.timeout_s:g} s (generation.timeout_s)"
                raise WorkerTimeout(f"{worker} {hangs}")

    async def everywhere(self, method: str) -> None:
        """Call a method of all engines. One that fails or is late breaks its process."""

        async def call(process: EngineProcess) -> None:
            answer = partial(process.worker.answer, process.actor.call.remote(method), method)
            try:
                await answer(timeout_s=self.config.timeout_s, setting="generation.timeout_s")
            except Exception as error:
                self._router.note(routing.Broke(process.id, error))

        await asyncio.gather(*map(call, self._up()))

    def end(self, id: routing.ProcessId) -> None:
        if keeper := self._keepers.pop(id, None):
            keeper.cancel()
        if process := self.running.pop(id, None):
            for run in process.runs:
                run.cancel()
            for worker in (process.worker, *process.stages):
                worker.kill()

    async def end_all(self) -> None:
        """End all processes in bounded time."""
        for keeper in self._keepers.values():
            keeper.cancel()
        ends = [process.actor.call.remote("shutdown") for process in self._up()]
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*ends, return_exceptions=True)
        for id in list(self.running):
            self.end(id)

    def release(self) -> None:
        self.cluster.shutdown()
        self._own_logs.close()

    def _up(self) -> list[EngineProcess]:
        return [process for process in self.running.values() if process.place]


def engine_bundles(
    config: GenerationConfig, *, cuda: bool, nodes: Sequence[str] = ()
) -> dict[str, list[Bundle]]:
    """Return what engines, and the GPUs kept from them, take of a cluster.

    nodes: of the ranks whose GPUs they share, which Ray counts as the ranks'.
    """
    cpus, size = config.cpus_per_replica, config.tensor_parallel_size
    if nodes:
        shares = rank_shares(nodes, config)
        return {"generation": [Bundle(cpus=cpus, node=nodes[share[0]]) for share in shares]}
    stages = config.num_replicas * config.pipeline_parallel_size
    if not cuda:
        return {"generation": [Bundle(cpus=cpus * size)] * stages}
    bundles = {"generation": [Bundle(cpus=cpus, gpus=size)] * stages}
    if config.colocated:
        if config.trainer_gpus:  # of this machine
            bundles["generation"][0] = replace(bundles["generation"][0], node=DRIVER)
        return bundles
    # Ray hands GPUs out in order: the trainer computes on the first ones.
    taken = 1 if config.trainer_gpus is None else config.trainer_gpus
    return {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)] * taken, **bundles}


def rank_shares(nodes: Sequence[str], config: GenerationConfig) -> list[list[int]]:
    """Return, for each stage of each replica, consecutive ranks of a node whose GPUs it shares.

    nodes: of the ranks, each node's together. Raises ValueError for too few ranks.

    >>> two = GenerationConfig(backend="vllm", num_replicas=2, tensor_parallel_size=2)
    >>> rank_shares("aaabb", two)
    [[0, 1], [3, 4]]
    """
    size, shares = config.tensor_parallel_size, list[list[int]]()
    for node in dict.fromkeys(nodes):
        own = [rank for rank, each in enumerate(nodes) if each == node]
        shares += [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
    stages = config.pipeline_parallel_size
    check_shares(config, len(shares) // stages, f"{len(nodes)} ranks on {len({*nodes})} nodes")
    return shares[: config.num_replicas * stages]


def check_places(config: GenerationConfig, engines: Sequence[Place]) -> None:
    """Raise ValueError where an engine with GPUs of its own is on this process's GPU, or none of
    those that share it.
    """
    if config.trainer_gpus == 0:  # no GPU of this machine trains
        return
    shared = bool(own_place().cards & cards_of(engines))
    holds, remedy = not shared, "let trainer.device be the first GPU that Ray has here"
    must = "must be true where a replica is on the trainer's GPU"
    if config.colocated:  # under torchrun, beside any of its ranks
        alone = config.trainer_gpus == 1 and any(one.gpus for one in engines)
        holds, remedy = shared or not alone, f"add --generation.no-colocated, or {remedy}"
        must = "must be false where no replica is on the trainer's GPU"
    require(holds, "generation.colocated", must, config.colocated, remedy)


def warn_softly(message: str) -> None:
    """Warn, and raise nothing where warnings are errors: it would end the router's work."""
    with suppress(Warning):
        warn(message)


class Supply:
    """Sends a source's newest weights to replicas without any, from any thread."""

    def __init__(
        self,
        config: GenerationConfig,
        spec: EngineSpec,
        processes: EngineProcesses,
        router: routing.RequestRouter,
    ) -> None:
        self.config, self.spec = config, spec
        self._processes, self._router = processes, router
        self._expected, self._stored = expected_weights(spec.files["config.json"])
        self._source: WeightSource = Weights(version=0, tensors=())
        self._version = 0
        self.sending = threading.RLock()
        self._based = set[Any]()
        """Processes that have the weights without adapters."""
        self.transport: Transport | None = None
        self._receipt: UpdateReceipt | None = None

    def update(self, source: WeightSource, in_flight: InFlight = "keep") -> int:
        """Give all replicas that are up the newest weights, and return their version. An error
        fails requests in flight.
        """
        router = self._router
        try:
            if in_flight == "wait":
                router.send(routing.Held(True))
                router.do(router.until(lambda state: state.drained))
            with self.sending:
                self._source = source
                router.send(routing.Published(source.newest()[0]))
            while not router.state.supplied:
                router.do(router.until(lambda state: bool(state.over or state.lacking)))
                if router.state.over:
                    raise router.state.over
                self.now()
            return self._version
        except BaseException as error:
            failed = f"an update of the weights failed while the request was in flight: {error}"
            with suppress(Exception):
                router.send(routing.Stopped(RuntimeError(failed)))
            raise
        finally:
            with suppress(RuntimeError):  # it has been shut down meanwhile
                router.send(routing.Held(False))

    def now(self) -> None:
        """Send weights to replicas without any, unless engines sleep."""
        with self.sending:
            state = self._router.state
            lacking = () if state.asleep else state.lacking
            processes = [one for id in lacking if (one := self._processes.running.get(id))]
            if processes:
                self._send({one.id.rank: one for one in processes})

    def _send(self, processes: dict[int, EngineProcess]) -> None:
        alone = self.spec.adapter_rank or self.spec.pipeline_parallel_size > 1
        sender = WeightSender(
            actors={rank: one.actor for rank, one in processes.items()},
            places={rank: one.place for rank, one in processes.items() if one.place},
            expected=self._expected,
            stored=self._stored,
            dtype=getattr(torch, self.spec.dtype),
            transport="object_store" if alone else self.config.weight_transport,
            processes=self.config.devices_per_replica,
            timeout_s=self.config.timeout_s,
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
            worker = processes[rank].worker
            error = WorkerDied(with_log(f"{worker} did not take the weights: {said}", worker.log))
            self._router.send(routing.Broke(processes[rank].id, error))
        if not receipt.failed:
            self._receipt, self._version = receipt, receipt.version
            if receipt.version < (self._router.state.version or 0):  # an old checkpoint was loaded
                self._router.send(routing.Published(receipt.version))
            self._based |= {one.id for one in processes.values()}
            for one in processes.values():
                self._router.send(routing.Supplied(one.id, receipt.version))

    def metrics(self) -> dict[str, float]:
        last, self._receipt = self._receipt, None
        return {} if last is None else {"weights/proved": float(last.num_weights)}


Request = tuple[tuple[int, ...], Any]
"""A prompt, and SamplingParams or a `Scoring`."""


class Replicas:
    """Engines that share the prompts, follow the trainer's weights and outlive their processes.

    The others do what a replica had not answered when it died or hung, with the same results: seeds
    belong to requests.
    """

    processes: type[EngineProcesses] = EngineProcesses

    def __init__(
        self, config: GenerationConfig, spec: EngineSpec, beside: Sequence[Place] = ()
    ) -> None:
        self.config, self.spec = config, spec
        self._open: dict[int, tuple[Request, asyncio.Future[Any]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._device = current_device()
        self._tending: asyncio.Task[None] | None = None
        self._usage = defaultdict[int, defaultdict[str, float]](lambda: defaultdict(float))
        self._seconds, self._since = 0.0, 0.0
        """With requests in flight; when there were none."""
        self._processes = self.processes(config, spec, beside)
        state = routing.routing(
            config.num_replicas, window=config.max_batch_size, max_restarts=config.max_restarts
        )
        self._router = routing.RequestRouter(state, self._act, self._processes.cluster.check)
        self.supply = Supply(config, spec, self._processes, self._router)
        try:
            self._router.do(self._processes.start_all(self._router))
            # Here, because each thread has a current device of its own.
            check_places(config, [one.place for one in self.running() if one.place])
            self._router.do(self._begin())
        except BaseException:
            self.shutdown()
            raise

    def running(self) -> list[EngineProcess]:
        up = [one.process for one in self._router.state.replicas if one.status == "up"]
        return [found for id in up if (found := self._processes.running.get(id))]

    def generate(self, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
        self.supply.now()
        return self._router.do(self._answers(requests))

    async def answers(self, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
        """Return each prompt's samples, or its one `Scored`. Called on any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._answers(requests), self._router.loop)
        return await asyncio.wrap_future(future)

    async def _begin(self) -> None:
        self._tending = asyncio.create_task(self._tend())

    async def _end(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        await self._processes.end_all()

    async def _tend(self) -> None:
        """Look after Ray, and replicas that came back, while requests are open."""
        router = self._router
        while True:
            await asyncio.sleep(routing.TICK_S)
            try:
                if self._open:
                    await asyncio.to_thread(router.check)
                if self._open and router.state.lacking:  # the event loop must go on
                    await asyncio.wrap_future(started(self.supply.now, self._device))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                said = error if isinstance(error, Exception) else RuntimeError(repr(error))
                router.note(routing.Stopped(said))

    async def _answers(self, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
        """On the router's event loop, as all below."""
        futures = [self._ask(request) for request in requests]
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    def _ask(self, request: Request) -> asyncio.Future[Any]:
        if not self._open:
            self._since = time.monotonic()
        number = self._router.state.arrived
        future: asyncio.Future[Any] = self._router.loop.create_future()
        self._open[number] = request, future
        future.add_done_callback(partial(self._settled, number))
        self._router.note(routing.Arrived(request[1].n))
        return future

    def _settled(self, number: int, future: asyncio.Future[Any]) -> None:
        del self._open[number]
        if not self._open:
            self._seconds += time.monotonic() - self._since
        if future.cancelled():
            self._router.note(routing.Cancelled(number))

    def _act(self, action: routing.Action) -> None:
        match action:
            case routing.Give(id, number):
                call = self._call(self._processes.running[id], number, *self._open[number][0])
                self._calls[number] = asyncio.ensure_future(call)
            case routing.Cancel(number) if number in self._calls:
                self._calls.pop(number).cancel()
            case routing.Reply(number, result) if number in self._open:
                future = self._open[number][1]
                if future.done():  # cancelled just now
                    return
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            case routing.End(id):
                self._usage[id.rank]["restarts"] += 1
                self._processes.end(id)
            case routing.Start(id):
                self._processes.start(id)
            case routing.Warn(message):
                warn_softly(message)

    async def _call(
        self, process: EngineProcess, number: int, prompt: tuple[int, ...], params: Any
    ) -> None:
        call = process.actor.sample.remote(prompt, params)
        event: routing.Event
        try:
            answer = await process.worker.answer(call)
        except asyncio.CancelledError:
            if process.id in self._processes.running:
                ray.cancel(call)
            raise
        except (ValueError, FloatingPointError) as error:
            event = routing.Answered(process.id, number, error)
        except Exception as error:
            event = routing.Broke(process.id, error)
        else:
            usage = self._usage[process.id.rank]
            usage["tokens"] += sum(len(one.token_ids) for one in answer.samples)
            usage["busy_s"] += max(0.0, answer.busy_s - process.busy_s)
            process.busy_s = max(process.busy_s, answer.busy_s)
            event = routing.Answered(process.id, number, answer.samples, answer.partial)
        self._calls.pop(number, None)
        self._router.note(event)

    def sleep(self) -> None:
        """Give memory back, which no start may take; requests pause."""
        if self.spec.sleep_level:
            with self.supply.sending:  # not between two calls of an update
                self._router.do(self._sleep())

    async def _sleep(self) -> None:
        await self._router.until(lambda state: state.settled)
        self._router.note(routing.Asleep(True, emptied=self.spec.sleep_level == 2))
        await self._processes.everywhere("sleep")

    def wake(self) -> None:
        if self.spec.sleep_level:
            self._router.do(self._wake())

    async def _wake(self) -> None:
        await self._processes.everywhere("wake")
        self._router.note(routing.Asleep(False))

    def metrics(self) -> dict[str, float]:
        """Return each replica's tokens, restarts and busy share since the last call."""
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
                error = "the generation backend was shut down before it answered"
                self._router.send(routing.Stopped(RuntimeError(error)))
                self._router.do(self._end())
            self._router.close()
        finally:
            self._processes.release()

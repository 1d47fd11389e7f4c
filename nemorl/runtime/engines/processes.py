"""The processes of engines, from their start to their end."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from nemorl.checks import require, warn
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.engines.engine import EngineActor, environment
from nemorl.runtime.engines.routing import Broke, ProcessId, RequestRouter, Started
from nemorl.runtime.engines.spec import EngineSpec, check_shares
from nemorl.runtime.engines.weights import Place, cards_of, own_place
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout, temporary_folder, with_log
from nemorl.runtime.workers.cluster import DRIVER, Bundle, RayVirtualCluster, ResourcesError
from nemorl.runtime.workers.worker import Worker

SHUTDOWN_S = 10.0
START = "generation.start_timeout_s"


@dataclass(eq=False)
class EngineProcess:
    id: ProcessId
    worker: Worker
    place: Place | None = None
    """None: it is not up yet."""
    busy_s: float = 0.0
    stages: list[Worker] = field(default_factory=list)
    """The pipeline's later stages."""
    runs: list[asyncio.Future[None]] = field(default_factory=list)
    """Their calls, which end only where a stage does."""

    @property
    def actor(self) -> Any:
        return self.worker.actor

    def refused(self, said: str) -> WorkerDied:
        text = f"{self.worker} did not take the new weights: {said}"
        return WorkerDied(with_log(text, self.worker.log))


class EngineProcesses:
    """Starts, watches and ends processes on the router's event loop, which hears what happens."""

    actor: type[EngineActor] = EngineActor

    def __init__(
        self, config: GenerationConfig, spec: EngineSpec, beside: Sequence[Place] = ()
    ) -> None:
        """beside: ranks whose GPUs engines share."""
        self.config, self.spec, self.beside = config, spec, beside
        self.running: dict[ProcessId, EngineProcess] = {}
        self._keepers: dict[ProcessId, asyncio.Task[None]] = {}
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

    async def start_all(self, router: RequestRouter) -> None:
        self._router = router
        ids = [one.process for one in router.state.replicas]
        await asyncio.gather(*map(self._start, ids))
        for id in ids:
            router.note(Started(id))
            self.start(id)

    def start(self, id: ProcessId) -> None:
        """Start a process, unless it is up, and watch it until it breaks."""
        self._keepers[id] = asyncio.ensure_future(self._keep(id))

    async def _keep(self, id: ProcessId) -> None:
        try:
            if id not in self.running:
                begin = time.monotonic()
                await self._start(id)
                warn_softly(f"replica {id.rank} is back after {time.monotonic() - begin:.1f} s")
                self._router.note(Started(id))
            await self._watch(self.running[id])
        except Exception as error:
            self._router.note(Broke(id, error))

    async def _start(self, id: ProcessId) -> None:
        """Start a process with an engine, and those of its other stages."""
        process = self.running[id] = EngineProcess(id, self.launched(id.rank))
        worker, first, limit_s = process.worker, self.spec, self.config.start_timeout_s
        up = partial(worker.answer, doing="its start", timeout_s=limit_s, setting=START)
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
        """Return a call's result, or raise what ended a stage before."""
        own = asyncio.ensure_future(call)
        try:
            await asyncio.wait([own, *process.runs], return_when=asyncio.FIRST_COMPLETED)
            for stage, run in zip(process.stages, process.runs, strict=True):
                if run.done():
                    run.result()  # or its error
                    raise stage.died("one of its workers ended")
            return await own
        finally:
            with suppress(RuntimeError):  # the event loop is closed where another start failed
                own.cancel()

    def launched(self, rank: int, stage: int = 0) -> Worker:
        placement, config = self._placement, self.config
        number = rank * config.pipeline_parallel_size + stage
        eager = self.spec.engine.get("enforce_eager", True)
        variables = environment(config.cpus_per_replica, eager=eager, cuda=self.spec.on_gpus)
        if self.beside:  # Ray counts these GPUs as the ranks', and must not hide them
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
        """Raise where a process died, or makes no progress for timeout_s though it has work."""
        before, idle, worker = -1, 0, process.worker
        period = self.config.timeout_s / 4  # counted: the driver itself may be stopped for a while
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
        """One that fails or is late breaks its process."""

        limit: Any = {"timeout_s": self.config.timeout_s, "setting": "generation.timeout_s"}

        async def call(process: EngineProcess) -> None:
            try:
                await process.worker.answer(process.actor.call.remote(method), method, **limit)
            except Exception as error:
                self._router.note(Broke(process.id, error))

        await asyncio.gather(*map(call, self._up()))

    def end(self, id: ProcessId) -> None:
        if keeper := self._keepers.pop(id, None):
            keeper.cancel()
        if process := self.running.pop(id, None):
            for run in process.runs:
                run.cancel()
            for worker in (process.worker, *process.stages):
                worker.kill()

    async def end_all(self) -> None:
        """In bounded time."""
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

    nodes: of the ranks whose GPUs they share; these are the ranks' in Ray's books.
    """
    if nodes:
        shares = rank_shares(nodes, config)
        cpus = config.cpus_per_replica
        return {"generation": [Bundle(cpus=cpus, node=nodes[share[0]]) for share in shares]}
    gpus = config.tensor_parallel_size if cuda else 0
    cpus = config.cpus_per_replica * (1 if gpus else config.tensor_parallel_size)
    stages = config.num_replicas * config.pipeline_parallel_size
    bundles = {"generation": [Bundle(cpus=cpus, gpus=gpus)] * stages}
    if not cuda:
        return bundles
    if config.colocated:
        if config.trainer_gpus:  # here: the first engine is on one of them
            bundles["generation"][0] = replace(bundles["generation"][0], node=DRIVER)
        return bundles
    # Ray hands GPUs out in order: the first ones are those that the trainer computes on.
    taken = 1 if config.trainer_gpus is None else config.trainer_gpus
    return {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)] * taken, **bundles}


def rank_shares(nodes: Sequence[str], config: GenerationConfig) -> list[list[int]]:
    """Return, for each stage of each replica, consecutive ranks of one node whose GPUs it shares.

    nodes: of the ranks, each node's together. Raises ValueError where there are too few.

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
    """Raise ValueError where engines that never sleep are on the GPU of this process, or none of
    those that take turns with it, unless no GPU of this machine trains (`trainer_gpus` is 0).
    """
    if config.trainer_gpus == 0:
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
    """Warn, also where warnings are errors: these would end the router's work."""
    with suppress(Warning):
        warn(message)
